"""`generate`: predicted outputs for transformers models, through transformers' own extension points.

Importing this needs transformers (4.56 or later, or 5): ``pip install "gpu-align[transformers]"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .errors import MissingExtraError
from .predictors.base import TokenPredictor
from .predictors.loop import PredictorLoop
from .predictors.predicted_output import PredictedOutputTokenPredictor, encode_prediction

try:
    from transformers import StoppingCriteriaList, StopStringCriteria, cache_utils
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.candidate_generator import CandidateGenerator
    from transformers.generation.configuration_utils import GenerationMode
except ImportError as error:
    raise MissingExtraError("gpu_align.hf", "transformers", "transformers") from error

_GROWS = cache_utils.DynamicLayer
_PREALLOCATED = cache_utils.StaticLayer
_WINDOW = cache_utils.DynamicSlidingWindowLayer
#: From transformers 4.57 on.
_STATIC_WINDOW = getattr(cache_utils, "StaticSlidingWindowLayer", None)
#: Before.
_OLD_STATIC_WINDOW = getattr(cache_utils, "SlidingWindowLayer", None)


class _Window(NamedTuple):
    """A window layer before a pass."""

    keys: torch.Tensor | None  # [1, heads, n, head_dim], None where nothing was stored yet
    values: torch.Tensor | None
    total: int  # tokens seen


class Rewind:
    """Makes the layers of a cache forget the last tokens of a pass.

    Args:
        cache: of one sequence.

    Raises:
        TypeError: it is not a ``Cache`` of transformers.
    """

    def __init__(self, cache: Any) -> None:
        if not hasattr(cache, "layers"):
            raise TypeError(f"past_key_values: expected a Cache, found {type(cache).__name__}")
        self._cache = cache
        self._windows: list[tuple[Any, _Window]] = []

    @property
    def is_preallocated(self) -> bool:
        """Whether its layers have their full length from the start."""
        return any(isinstance(layer, _PREALLOCATED) for layer in self._cache.layers)

    def reason_against(self) -> str | None:
        """Why the cache cannot forget at all, or None."""
        known = {_GROWS, _PREALLOCATED, _WINDOW, _STATIC_WINDOW, _OLD_STATIC_WINDOW}
        for layer in self._cache.layers:
            if type(layer) not in known:
                return f"a {type(layer).__name__} of the cache cannot forget"
        return None

    def room(self, length: int, pending: int) -> int | None:
        """The most draft tokens behind `length` tokens, of which the pass feeds `pending`; None is any number."""
        room: int | None = None
        for layer in self._cache.layers:
            kind = type(layer)
            if kind is _WINDOW:
                most = layer.sliding_window - 1 - pending
            elif kind is _STATIC_WINDOW:
                most = layer.max_cache_len - pending
            elif kind is _OLD_STATIC_WINDOW:
                most = layer.max_cache_len - length
            else:
                continue
            room = max(0, most if room is None else min(room, most))
        return room

    def remember(self) -> None:
        """Prepare for a pass with a draft."""
        self._windows = []
        for layer in self._cache.layers:
            if type(layer) is _WINDOW:
                # A pass replaces these tensors.
                stored = layer.keys is not None and layer.cumulative_length > 0
                keys, values = (layer.keys, layer.values) if stored else (None, None)
                self._windows.append((layer, _Window(keys, values, layer.cumulative_length)))
            elif type(layer) is _STATIC_WINDOW:
                # A pass writes into these.
                total = _total(layer)
                keys, values = (layer.keys.clone(), layer.values.clone()) if total else (None, None)
                self._windows.append((layer, _Window(keys, values, total)))

    def forget(self, length: int, end: int) -> None:
        """Forget tokens ``length <= i < end`` of the pass since `remember`."""
        before = {id(layer): window for layer, window in self._windows}
        for layer in self._cache.layers:
            kind = type(layer)
            if kind is _GROWS:
                layer.crop(length - end)  # negative: so many tokens less
            elif kind is _WINDOW:
                _rewind_window(layer, before[id(layer)], length, end)
            elif kind is _STATIC_WINDOW:
                _rewind_static_window(layer, before[id(layer)], length, end)
            elif kind is _OLD_STATIC_WINDOW:
                layer.keys[:, :, length:end].zero_()
                layer.values[:, :, length:end].zero_()
                layer.cumulative_length -= end - length
            elif isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.sub_(end - length)
            else:  # in early versions a static layer counts what is not zero
                layer.keys[:, :, length:end].zero_()
                layer.values[:, :, length:end].zero_()
        self._windows = []


def _rewind_window(layer: Any, before: _Window, length: int, end: int) -> None:
    fed, kept = end - before.total, length - before.total
    stored = layer.keys.shape[-2]
    new = slice(stored - fed, stored - fed + kept)  # room() lets all that was fed fit in
    keys, values = layer.keys[:, :, new], layer.values[:, :, new]
    layer.keys = layer.keys[:, :, :0] if before.keys is None else before.keys
    layer.values = layer.values[:, :, :0] if before.values is None else before.values
    layer.cumulative_length = before.total
    layer.update(keys, values)


def _rewind_static_window(layer: Any, before: _Window, length: int, end: int) -> None:
    fed, kept = end - before.total, length - before.total
    stored = min(end, layer.max_cache_len)
    new = slice(stored - fed, stored - fed + kept)
    window = layer.max_cache_len
    for stored_now, stored_before in ((layer.keys, before.keys), (layer.values, before.values)):
        accepted = stored_now[:, :, new]
        if stored_before is not None:
            accepted = torch.cat([stored_before[:, :, : min(before.total, window)], accepted], dim=2)
        accepted = accepted[:, :, -window:].clone()
        stored_now.zero_()
        stored_now[:, :, : accepted.shape[2]] = accepted
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
        layer.cumulative_length.fill_(min(length, window))  # not used behind the first window
    else:
        layer.cumulative_length = length


def _total(layer: Any) -> int:
    """Tokens that a preallocated window has seen."""
    return int(getattr(layer, "cumulative_length_int", layer.cumulative_length))


#: Arguments of ``forward`` that are made here for each pass.
_MADE_HERE = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep",
}  # fmt: skip


class DraftForward:
    """Runs one sequence through a model, a draft at a time::

        forward = DraftForward(model, input_ids, model_kwargs, output_attentions=False, ...)
        outputs = forward(ids, draft)      # logits behind ids, and behind each token of the draft
        forward.keep(ids)                  # ids by now: what was accepted, and one token more

    Tokens that the cache holds are not fed again, and `keep` makes it forget those that were refuted.

    Args:
        model: a decoder-only model.
        input_ids: [1, n] int64: the prompt.
        model_kwargs: as ``generate`` gives them to a decoding loop.
        outputs: more arguments for each pass, such as ``output_attentions=True``.

    Attributes:
        steps: passes so far.
        failure: why no draft can be verified, or None.
        cache: the model's cache, or None.

    Raises:
        ValueError: `model_kwargs` holds tensors of a kind that is not known here, or an empty remainder to feed.
        TypeError: a cache that is not one of transformers' own classes.
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
        self._rewind = Rewind(self.cache) if self.cache is not None else None
        self.failure = self._rewind.reason_against() if self._rewind is not None else None
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
        """One pass. Returns the model's output, whose last ``len(draft) + 1`` logits are those wanted.

        Args:
            ids: [1, n] int64: all tokens so far.
            draft: token ids to verify.
        """
        fed = torch.cat([ids[:, self._cached :], ids.new_tensor([list(draft)])], dim=1) if draft else (
            ids[:, self._cached :]
        )  # fmt: skip
        self._end = ids.shape[1] + len(draft)
        arguments: dict[str, Any] = {"input_ids": fed, "use_cache": self._use_cache, **self._fixed}
        mask = self._mask_until(self._end)
        if mask is not None:
            arguments["attention_mask"] = mask
        if "position_ids" in self._takes:
            arguments["position_ids"] = self._positions(mask, fed.device)
        if "cache_position" in self._takes:
            arguments["cache_position"] = torch.arange(self._cached, self._end, device=fed.device)
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = len(draft) + 1
        if self.cache is not None:
            arguments["past_key_values"] = self.cache
        if draft and self._rewind is not None:
            self._rewind.remember()
        outputs = self._model(**arguments, return_dict=True)
        self.steps += 1
        return outputs

    def room(self, ids: torch.Tensor) -> int | None:
        """The most draft tokens that a pass behind `ids` may have; None is any number."""
        if self.failure is not None:
            return 0
        length = ids.shape[1]
        return None if self._rewind is None else self._rewind.room(length, length - self._cached)

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has its full length from the start."""
        return self._rewind is not None and self._rewind.is_preallocated

    def keep(self, ids: torch.Tensor) -> None:
        """Forget the tokens of the last pass that are not in ``ids[:, :-1]``; the last one was not fed yet."""
        if self._rewind is None:
            return
        self._cached = min(ids.shape[1] - 1, self._end)
        if self._cached < self._end:
            self._rewind.forget(self._cached, self._end)

    def _mask_until(self, end: int) -> torch.Tensor | None:
        if self._mask is None or "attention_mask" not in self._takes:
            return None
        more = self._mask.new_ones((1, end - self._mask.shape[1]))
        return torch.cat([self._mask, more], dim=1)

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


#: Arguments of ``model.generate`` that choose another source of drafts, another prompt or other passes.
_REFUSED = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "inputs", "inputs_embeds",
    "prefill_chunk_size", "synced_gpus",
)  # fmt: skip


@dataclass(frozen=True)
class PredictedOutputs:
    """What became of the drafts of one generation.

    Attributes:
        steps: forward passes of the model, prefill included.
        accepted: draft tokens that the model wrote.
        rejected: draft tokens that it did not; those behind the last token are neither.
        failure: why the predictor was not asked any more, or None.
    """

    steps: int
    accepted: int
    rejected: int
    failure: str | None = None


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

    The tokens are those of ``model.generate``: a draft only decides how many of them one pass yields. Greedy
    generation is equal but where rounding decides between two tokens, as a pass over several tokens may round
    otherwise than one over one token. Sampling draws once for each token, in order, so that the distribution is
    the same, and with the same seed usually the text. The first pass verifies a draft together with the prompt.

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

    Raises:
        TypeError: a predictor, prediction or prompt of another type.
        ValueError: an encoder-decoder or recurrent model, beams, more than one sequence, another source of drafts,
            inputs other than token ids, a prediction with ids outside the vocabulary where `strict`, or text
            without a tokenizer.
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
    drafting = predictor if predictor is not None else PredictedOutputTokenPredictor()
    loop = PredictorLoop(
        drafting,
        num_draft_tokens=num_draft_tokens,
        vocab_size=model.config.get_text_config().vocab_size,
        strict=strict,
        timeout=predictor_timeout,
    )
    decode = _Decode(loop, predicted, tokenizer, generate_kwargs.get("streamer"))
    _add_stop_strings(generate_kwargs, tokenizer)
    try:
        return model.generate(ids.to(model.device), custom_generate=decode, **generate_kwargs)
    finally:
        loop.stop()
        if predictor is None:
            drafting.dispose()


class PredictorCandidates(CandidateGenerator):  # type: ignore[misc]
    """A `PredictorLoop` as a candidate generator of transformers, for one sequence.

    Args:
        loop: started with the prompt.
        max_length: the most tokens of prompt and output; a draft leaves room for a token of the model.
    """

    def __init__(self, loop: PredictorLoop, max_length: int | None = None) -> None:
        self.loop = loop
        self._max_length = max_length
        self._length: int | None = None

    def get_candidates(
        self, input_ids: torch.Tensor, room: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """`input_ids` [1, n] with a draft of at most `room` tokens behind them, [1, n + draft]; no logits."""
        self._length = input_ids.shape[1]
        if self._max_length is not None:
            left = self._max_length - self._length - 1
            room = left if room is None else min(room, left)
        draft = self.loop.draft(room)
        if not draft:
            return input_ids, None
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor | None, num_matches: int
    ) -> None:
        """Take what was generated since `get_candidates`; the loop counts the matches by itself."""
        self.loop.push(input_ids[0, self._length :].tolist())


class _Decode:
    """The decoding loop of one generation, for the ``custom_generate`` argument of ``model.generate``."""

    def __init__(self, loop: PredictorLoop, prediction: list[int], tokenizer: Any, streamer: Any) -> None:
        self._loop = loop
        self._prediction = prediction
        self._tokenizer = tokenizer
        self._streamer = streamer  # transformers 5 does not hand it on

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        _check_mode(generation_config, input_ids, synced_gpus)
        record = _Record(generation_config)
        forward = DraftForward(model, input_ids, model_kwargs, **record.wanted())
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids[0] if mask is None else input_ids[0][mask[0, : input_ids.shape[1]].bool()]
        longest: int | None = generation_config.max_length
        self._loop.start(
            prompt.tolist(), self._prediction, max_len=longest, tokenizer=self._tokenizer
        )  # fmt: skip
        if forward.failure is not None:
            self._loop.fail(forward.failure)
        candidates = PredictorCandidates(self._loop, longest)
        ids, finished = input_ids, False
        while not finished:
            start = ids.shape[1]
            draft: list[int] = candidates.get_candidates(ids, room=forward.room(ids))[0][0, start:].tolist()
            outputs = forward(ids, draft)
            logits = outputs.logits[:, -len(draft) - 1 :]  # [1, draft + 1, vocab]
            for i in range(len(draft) + 1):
                raw = logits[:, i].to(copy=True, dtype=torch.float32, device=ids.device)
                scores = logits_processor(ids, raw)
                token = _choose(scores, generation_config.do_sample)  # [1]
                ids = torch.cat([ids, token[:, None]], dim=1)
                if self._streamer is not None:
                    self._streamer.put(token.cpu())
                record.add(scores, raw, outputs, i, len(draft), forward.is_preallocated)
                finished = bool(stopping_criteria(ids, record.scores).all())
                if finished or (i < len(draft) and int(token) != draft[i]):
                    break
            forward.keep(ids)
            candidates.update_candidate_strategy(ids, None, ids.shape[1] - start - 1)
            del outputs, logits
        if self._streamer is not None:
            self._streamer.end()
        if not generation_config.return_dict_in_generate:
            return ids
        result = GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=record.scores,
            logits=record.logits,
            attentions=record.attentions,
            hidden_states=record.hidden_states,
            past_key_values=forward.cache,
        )
        counts = self._loop.predictions
        result.predicted_outputs = PredictedOutputs(
            forward.steps, counts.validated, counts.refuted, self._loop.failure
        )
        return result


class _Record:
    """What ``return_dict_in_generate`` asks for: tuples with one entry a token, None where not wanted."""

    def __init__(self, config: Any) -> None:
        def empty(wanted: bool | None) -> tuple[Any, ...] | None:
            return () if config.return_dict_in_generate and wanted else None

        self.scores = empty(config.output_scores)
        self.logits = empty(config.output_logits)
        self.attentions = empty(config.output_attentions)
        self.hidden_states = empty(config.output_hidden_states)

    def wanted(self) -> dict[str, bool]:
        """Arguments of the model's forward."""
        return {
            "output_attentions": self.attentions is not None,
            "output_hidden_states": self.hidden_states is not None,
        }

    def add(
        self,
        scores: torch.Tensor,
        raw: torch.Tensor,
        outputs: Any,
        i: int,
        drafted: int,
        is_preallocated: bool,
    ) -> None:
        """Take token i of a pass over a draft."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        if self.hidden_states is not None:
            rows = [_rows(layer, 1, i, drafted, not self.hidden_states) for layer in outputs.hidden_states]
            self.hidden_states += (tuple(rows),)
        if self.attentions is not None:
            first = not self.attentions
            layers = []
            for layer in outputs.attentions or ():
                unseen = 0 if is_preallocated else drafted - i  # such a cache shows all of its columns always
                columns = layer.shape[-1] - unseen
                layers.append(_rows(layer, 2, i, drafted, first)[..., :columns])
            self.attentions += (tuple(layers),)


def _rows(layer: torch.Tensor, dim: int, i: int, drafted: int, with_prompt: bool) -> torch.Tensor:
    """The row of token i of a pass; of the first token those of the prompt before it, too."""
    row = layer.shape[dim] - drafted - 1 + i
    start = 0 if with_prompt else row
    return layer.narrow(dim, start, row + 1 - start)


def _choose(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """[1] int64, by the operations of ``model.generate``, which keeps the random draws the same."""
    if do_sample:
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


def _check_mode(config: Any, input_ids: torch.Tensor, synced_gpus: bool) -> None:
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
