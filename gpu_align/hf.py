"""`generate`: predicted outputs for transformers models, through transformers' own extension points.

Importing this needs transformers (4.56 or later, or 5): ``pip install ".[transformers]"`` in a checkout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import MissingExtraError
from .ops.backend import check_token_ids
from .predictors.base import TokenPredictor
from .predictors.loop import PredictorLoop
from .predictors.predicted_output import PredictedOutputTokenPredictor, encode_prediction

try:
    from transformers import StoppingCriteriaList, StopStringCriteria, cache_utils
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.configuration_utils import GenerationMode
except ImportError as error:
    raise MissingExtraError("gpu_align.hf", "transformers", "transformers") from error

_GROWS, _PREALLOCATED = cache_utils.DynamicLayer, cache_utils.StaticLayer
_WINDOW = cache_utils.DynamicSlidingWindowLayer
#: From transformers 4.57 on, and before.
_STATIC_WINDOW = getattr(cache_utils, "StaticSlidingWindowLayer", None)
_OLD_STATIC_WINDOW = getattr(cache_utils, "SlidingWindowLayer", None)
_KNOWN_LAYERS = {_GROWS, _PREALLOCATED, _WINDOW, _STATIC_WINDOW, _OLD_STATIC_WINDOW}

#: Arguments of ``forward`` that are made here for each pass.
_MADE_HERE = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep",
}  # fmt: skip
#: Arguments of ``model.generate`` that choose another source of drafts, another prompt or other passes.
_REFUSED = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "inputs", "inputs_embeds",
    "prefill_chunk_size", "synced_gpus",
)  # fmt: skip


class DraftForward:
    """Runs one sequence through a model, a draft at a time::

        forward = DraftForward(model, input_ids, model_kwargs, output_attentions=False, ...)
        outputs = forward(ids, draft)      # logits behind ids, and behind each token of the draft
        forward.keep(ids)                  # ids by now: what was accepted, and one token more

    Tokens that the cache holds are not fed again, and `keep` makes it forget those that were refuted. `steps`
    counts passes; `failure` says why no draft can be verified, or is None.
    """

    def __init__(
        self, model: Any, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], **outputs: bool
    ) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._prompt_len: int = input_ids.shape[1]
        self._mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        self._given_positions: torch.Tensor | None = model_kwargs.get("position_ids")
        self._use_cache: bool = model_kwargs.get("use_cache") is not False
        self.cache: Any = model_kwargs.get("past_key_values") if self._use_cache else None
        more = {name: value for name, value in model_kwargs.items() if name not in _MADE_HERE}
        if unknown := [name for name, value in more.items() if isinstance(value, torch.Tensor)]:
            raise ValueError(f"generate: expected a prompt of token ids alone, found {', '.join(unknown)}")
        if self._given_positions is not None and self._given_positions.ndim != 2:
            raise ValueError("position_ids: expected the shape [1, n], found more dimensions")
        if self.cache is not None and not hasattr(self.cache, "layers"):
            raise TypeError(f"past_key_values: expected a Cache, found {type(self.cache).__name__}")
        self._layers: list[Any] = [] if self.cache is None else self.cache.layers
        unforgetting = [type(layer).__name__ for layer in self._layers if type(layer) not in _KNOWN_LAYERS]
        self.failure = f"a {unforgetting[0]} of the cache cannot forget" if unforgetting else None
        #: Of each layer with a window, before a pass with a draft: keys, values and the number of tokens seen.
        self._windows: dict[int, tuple[Any, Any, int]] = {}
        self._fixed = {name: value for name, value in more.items() if name in self._takes}
        self._fixed |= {name: True for name, wanted in outputs.items() if wanted}
        #: Tokens whose keys and values the cache holds.
        self._cached = 0 if self.cache is None else int(self.cache.get_seq_length())
        if self._cached >= self._prompt_len:
            raise ValueError(
                f"input_ids: expected more tokens than the {self._cached} of past_key_values, "
                f"found {self._prompt_len}"
            )
        self._end = self._cached
        self.steps = 0

    def __call__(self, ids: torch.Tensor, draft: Sequence[int]) -> Any:
        """One pass; ids: [1, n] int64, all so far. The output's last ``len(draft) + 1`` logits are wanted."""
        fed = torch.cat([ids[:, self._cached :], ids.new_tensor([list(draft)])], dim=1)
        self._end = ids.shape[1] + len(draft)
        arguments: dict[str, Any] = {"input_ids": fed, "use_cache": self._use_cache, **self._fixed}
        mask = None
        if self._mask is not None and "attention_mask" in self._takes:
            more = self._mask.new_ones((1, self._end - self._mask.shape[1]))
            arguments["attention_mask"] = mask = torch.cat([self._mask, more], dim=1)
        if "position_ids" in self._takes:
            arguments["position_ids"] = self._positions(mask, fed.device)
        if "cache_position" in self._takes:
            arguments["cache_position"] = torch.arange(self._cached, self._end, device=fed.device)
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = len(draft) + 1
        if self.cache is not None:
            arguments["past_key_values"] = self.cache
        for layer in self._layers if draft else ():
            if type(layer) in (_WINDOW, _STATIC_WINDOW):
                seen = int(getattr(layer, "cumulative_length_int", layer.cumulative_length))
                stored = [layer.keys, layer.values] if seen else [None, None]
                # A pass writes into static ones, and replaces the others.
                if seen and type(layer) is _STATIC_WINDOW:
                    stored = [layer.keys.clone(), layer.values.clone()]
                self._windows[id(layer)] = stored[0], stored[1], seen
        outputs = self._model(**arguments, return_dict=True)
        self.steps += 1
        return outputs

    def _positions(self, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """[1, fed] int64: given for the prompt, or counted where the mask is 1, and one more for each token."""
        given = self._given_positions
        if given is not None:
            behind = given[:, -1:] + torch.arange(1, self._end - self._prompt_len + 1, device=device)
            positions = torch.cat([given, behind], dim=1)
        elif mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp_(min=0)
        else:
            positions = torch.arange(self._end, device=device)[None]
        return positions[:, positions.shape[1] - (self._end - self._cached) :]

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has its full length from the start."""
        return any(isinstance(layer, _PREALLOCATED) for layer in self._layers)

    def room(self, length: int) -> int | None:
        """The most draft tokens that a pass behind `length` tokens may have; None is any number."""
        if self.failure is not None:
            return 0
        pending = length - self._cached
        rooms = []
        for layer in self._layers:
            if type(layer) is _WINDOW:
                rooms.append(layer.sliding_window - 1 - pending)
            elif type(layer) is _STATIC_WINDOW:
                rooms.append(layer.max_cache_len - pending)
            elif type(layer) is _OLD_STATIC_WINDOW:
                rooms.append(layer.max_cache_len - length)
        return max(0, min(rooms)) if rooms else None

    def keep(self, ids: torch.Tensor) -> None:
        """Forget the tokens of the last pass that are not in ``ids[:, :-1]``; the last one was not fed yet."""
        if self.cache is None:
            return
        length, end = min(ids.shape[1] - 1, self._end), self._end
        self._cached = length
        for layer in self._layers if length < end else ():
            if type(layer) is _GROWS:
                layer.crop(length - end)  # negative: so many tokens less
            elif type(layer) in (_WINDOW, _STATIC_WINDOW):
                _rewind_window(layer, *self._windows[id(layer)], length, end)
            else:
                count = getattr(layer, "cumulative_length", None)
                if isinstance(count, torch.Tensor):
                    count.sub_(end - length)
                    continue
                # Early versions count what is not zero, and beside it in a window.
                layer.keys[:, :, length:end].zero_()
                layer.values[:, :, length:end].zero_()
                if count is not None:
                    layer.cumulative_length -= end - length


def _rewind_window(layer: Any, keys: Any, values: Any, seen: int, length: int, end: int) -> None:
    """Forget tokens ``length <= i < end`` of a pass; keys, values: of the `seen` tokens before it, or None."""
    is_static = type(layer) is _STATIC_WINDOW
    window = layer.max_cache_len if is_static else layer.sliding_window - 1
    for name, before in (("keys", keys), ("values", values)):
        now = getattr(layer, name)
        first = min(end, now.shape[2]) - (end - seen)  # room() lets all that was fed fit in
        stored = now[:, :, first : first + length - seen]
        if before is not None:
            stored = torch.cat([before[:, :, : min(seen, window)], stored], dim=2)
        stored = stored[:, :, -window:]
        if is_static:
            stored = stored.clone()
            now.zero_()
            now[:, :, : stored.shape[2]] = stored
        else:
            setattr(layer, name, stored)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
        layer.cumulative_length.fill_(min(length, window))  # not used behind the first window
    else:
        layer.cumulative_length = length


@dataclass(frozen=True)
class PredictedOutputs:
    """What became of the drafts of one generation."""

    steps: int  # forward passes of the model, prefill included
    accepted: int  # draft tokens that the model wrote
    rejected: int  # draft tokens that it did not; those behind the last token are neither
    failure: str | None = None  # why the predictor was not asked any more


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor | Sequence[int] | str,
    *,
    prediction: str | Sequence[int] | torch.Tensor | None = None,
    predictor: TokenPredictor | None = None,
    tokenizer: Any = None,
    num_draft_tokens: int = 16,
    strict: bool = False,
    predictor_timeout: float | None = 10.0,
    **generate_kwargs: Any,
) -> Any:
    """``model.generate(input_ids, ...)`` in fewer forward passes.

    ::

        while not finished:
            draft = predictor.predict_tokens()[:K]
            logits = model(tokens that the cache lacks, then the draft)
            for each position of the draft, and the one behind it:
                token = chosen from the processed logits, as model.generate chooses it
                append token, give it to the streamer, ask the stopping criteria
                stop here where the token is not the draft's, or the generation has finished

    The tokens are those of ``model.generate``, but where rounding decides between two: a pass over several tokens
    may round otherwise. Sampling draws once for each token, in order, so that the distribution is the same, and
    with the same seed usually the text. The first pass verifies a draft together with the prompt.

    Args:
        model: a decoder-only model of transformers with a KV cache.
        input_ids: the prompt: one sequence of token ids, [n] or [1, n], or text, which the tokenizer encodes
            with its special tokens.
        prediction: the predicted output: token ids, or text, which the tokenizer encodes without special tokens.
            None or empty: drafts come from the prompt and the output alone.
        predictor: what drafts instead of a `PredictedOutputTokenPredictor`. It is stopped, not disposed of, and
            gets the prediction in its options.
        tokenizer: for text, for ``stop_strings`` and for predictors that compare vocabularies.
        num_draft_tokens: K, the most draft tokens a pass; ``>= 1``.
        strict: raise what a predictor raises. By default a predictor that fails costs its drafts and no more, as
            `PredictorLoop` describes.
        predictor_timeout: seconds that one call of a predictor of your own may take; None is any number.
        generate_kwargs: as for ``model.generate``: greedy or sampling, one sequence, static or dynamic caches,
            logits processors, streamers, stopping criteria. Drafts are verified eagerly: nothing is compiled.

    Returns:
        What ``model.generate`` returns: [1, n + new] int64, or with ``return_dict_in_generate=True`` a
        ``GenerateDecoderOnlyOutput``, with the attribute `predicted_outputs`, a `PredictedOutputs`.

    A streamer gets one token at a time, and stopping criteria are asked behind each token, as in
    ``model.generate``. Scores, logits, attentions and hidden states have one entry a token.

    TypeError, ValueError: arguments of other types; an encoder-decoder or recurrent model, beams, more than one
    sequence, another source of drafts, inputs other than token ids, text without a tokenizer, a
    prediction with ids outside the vocabulary.
    """
    if model.config.is_encoder_decoder:
        found = f"{type(model).__name__}, an encoder-decoder"
        raise ValueError(f"model: expected a decoder-only model, found {found}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"model: expected a model with a KV cache, found {type(model).__name__}, whose state cannot go back"
        )
    for name in _REFUSED:
        if (value := generate_kwargs.get(name)) is not None and value is not False:
            raise ValueError(f"{name}: not together with gpu_align.hf.generate")
    ids, mask = _prompt(input_ids, tokenizer)
    if mask is not None:
        generate_kwargs.setdefault("attention_mask", mask.to(model.device))
    predicted = encode_prediction(prediction, tokenizer) if prediction is not None else []
    vocab_size = model.config.get_text_config().vocab_size
    check_token_ids("prediction", np.asarray(predicted, dtype=np.int64), vocab_size)
    drafting = predictor if predictor is not None else PredictedOutputTokenPredictor()
    loop = PredictorLoop(
        drafting,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        strict=strict,
        timeout=predictor_timeout,
    )
    # transformers 5 does not hand the streamer on.
    decode = functools.partial(_decode, loop, predicted, tokenizer, generate_kwargs.get("streamer"))
    _add_stop_strings(generate_kwargs, tokenizer)
    try:
        return model.generate(ids.to(model.device), custom_generate=decode, **generate_kwargs)
    finally:
        loop.stop()
        if predictor is None:
            drafting.dispose()


def _decode(
    loop: PredictorLoop,
    prediction: list[int],
    tokenizer: Any,
    given_streamer: Any,
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop of one generation, for the ``custom_generate`` argument of ``model.generate``."""
    config = generation_config
    if config.num_beams != 1 or (config.num_return_sequences or 1) != 1 or input_ids.shape[0] != 1:
        raise ValueError(
            "generate: expected one sequence without beams, found "
            f"{input_ids.shape[0]} sequences, num_beams={config.num_beams}"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generate: expected greedy search or sampling, found {mode.value}")
    if synced_gpus:
        raise ValueError("synced_gpus: not together with drafts, as ranks would differ in their passes")
    wanted = [f"output_{name}" for name in ("scores", "logits", "attentions", "hidden_states")]
    wanted = [name for name in wanted if config.return_dict_in_generate and getattr(config, name)]
    #: What the result has one entry a token of.
    record: dict[str, tuple[Any, ...]] = {name.removeprefix("output_"): () for name in wanted}
    of_model = {name: name in wanted for name in ("output_attentions", "output_hidden_states")}
    forward = DraftForward(model, input_ids, model_kwargs, **of_model)
    mask = model_kwargs.get("attention_mask")
    prompt = input_ids[0] if mask is None else input_ids[0][mask[0, : input_ids.shape[1]].bool()]
    longest: int | None = config.max_length
    loop.start(prompt.tolist(), prediction, max_len=longest, tokenizer=tokenizer, sampling=config)
    if forward.failure is not None:
        loop.fail(forward.failure)
    ids, finished = input_ids, False
    while not finished:
        start = ids.shape[1]
        rooms = [forward.room(start), None if longest is None else longest - start - 1]
        draft = loop.draft(min((room for room in rooms if room is not None), default=None))
        outputs = forward(ids, draft)
        logits = outputs.logits[:, -len(draft) - 1 :]  # [1, draft + 1, vocab]
        for i in range(len(draft) + 1):
            raw = logits[:, i].to(copy=True, dtype=torch.float32, device=ids.device)
            scores = logits_processor(ids, raw)
            # [1], by the operations of `model.generate`, which keeps the random draws the same.
            if config.do_sample:
                token = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
            else:
                token = scores.argmax(dim=-1)
            ids = torch.cat([ids, token[:, None]], dim=1)
            if given_streamer is not None:
                given_streamer.put(token.cpu())
            for name, entries in record.items():
                if name == "scores":
                    record[name] += (scores,)
                elif name == "logits":
                    record[name] += (raw,)
                else:
                    # A preallocated cache shows all of its columns always.
                    unseen = 0 if forward.is_preallocated else len(draft) - i
                    record[name] += (_layers_of_token(name, outputs, len(draft) - i, unseen, not entries),)
            finished = bool(stopping_criteria(ids, record.get("scores")).all())
            if finished or (i < len(draft) and int(token) != draft[i]):
                break
        forward.keep(ids)
        loop.push(ids[0, start:].tolist())
        del outputs, logits
    if given_streamer is not None:
        given_streamer.end()
    if not config.return_dict_in_generate:
        return ids
    result = GenerateDecoderOnlyOutput(sequences=ids, past_key_values=forward.cache, **record)
    counts = loop.predictions
    result.predicted_outputs = PredictedOutputs(forward.steps, counts.validated, counts.refuted, loop.failure)
    return result


def _layers_of_token(name: str, outputs: Any, behind: int, unseen: int, is_first: bool) -> tuple[Any, ...]:
    """Attentions or hidden states of the token with `behind` tokens of its pass behind it, of each layer.

    Those of the first token have the rows of the prompt before it, too. unseen: columns of later tokens.
    """
    dim = 2 if name == "attentions" else 1
    layers = []
    for layer in getattr(outputs, name) or ():
        row = layer.shape[dim] - 1 - behind
        start = 0 if is_first else row
        rows = layer.narrow(dim, start, row + 1 - start)
        layers.append(rows[..., : rows.shape[-1] - unseen] if name == "attentions" else rows)
    return tuple(layers)


def _prompt(input_ids: Any, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[1, n] int64, and a mask where a tokenizer made one."""
    if isinstance(input_ids, str):
        if tokenizer is None:
            raise ValueError("input_ids: expected token ids, or a tokenizer for the text")
        encoded = tokenizer(input_ids, return_tensors="pt")
        return encoded["input_ids"], encoded.get("attention_mask")
    ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(encode_prediction(input_ids))
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one sequence, found the shape {tuple(ids.shape)}")
    return ids.long(), None


def _add_stop_strings(generate_kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Make a criterion of ``stop_strings``: transformers 5 does not give its own the tokenizer here."""
    strings = generate_kwargs.pop("stop_strings", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings: expected a tokenizer beside them")
    given = generate_kwargs.get("stopping_criteria") or []
    generate_kwargs["stopping_criteria"] = StoppingCriteriaList(
        [*given, StopStringCriteria(tokenizer, strings)]
    )
