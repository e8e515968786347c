"""`generate`: predicted outputs for transformers models, through transformers' own extension points.

Importing this needs transformers (4.56 or later, or 5): ``pip install ".[transformers]"`` in a checkout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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
    from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria, cache_utils
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.generation.utils import ALL_CACHE_NAMES
except ImportError as error:
    raise MissingExtraError("gpu_align.hf", "transformers", "transformers") from error

_PREALLOCATED, _WINDOW = cache_utils.StaticLayer, cache_utils.DynamicSlidingWindowLayer
#: From transformers 4.57 on, and before.
_STATIC_WINDOW = getattr(cache_utils, "StaticSlidingWindowLayer", None)
_OLD_STATIC_WINDOW = getattr(cache_utils, "SlidingWindowLayer", None)
#: Layers that `DraftForward.keep` crops itself: their own `crop` is missing, or fails where a window is full.
_CROPPED_HERE = {_PREALLOCATED, _WINDOW, _STATIC_WINDOW, _OLD_STATIC_WINDOW}

#: The argument and the output that hold the cache: "past_key_values", since transformers 5.24 "cache".
CACHE_NAME = ALL_CACHE_NAMES[0]
#: What says which tokens to feed: ``cache_position``, or, in newer versions, ``next_sequence_length``.
_PREPARATION = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
#: Arguments of ``forward`` with an entry a token, in the last dimension.
_GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
#: Arguments of ``model.generate`` that choose another source of drafts, another prompt or other passes.
_REFUSED = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "inputs", "inputs_embeds",
    "prefill_chunk_size", "synced_gpus", "token_healing",
)  # fmt: skip


class DraftForward:
    """Runs one sequence through a model, a draft at a time, with inputs that transformers prepares::

        forward = DraftForward(model, input_ids, model_kwargs, output_attentions=False, ...)
        outputs = forward(ids, draft)      # logits behind ids, and behind each token of the draft
        forward.keep(ids)                  # ids by now: what was accepted, and one token more

    Tokens that the cache holds are not fed again, and `keep` makes it forget those that were refuted. `steps`
    counts passes; `failure` says why no draft can be verified, or is None.

    ValueError, by the first pass at the latest: inputs other than token ids, or a model that is fed other tokens
    than the sequence, computes fewer logits than it is asked for, or has no cache that holds the sequence.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        model_kwargs: Mapping[str, Any],
        name: str = "",
        **outputs: bool,
    ) -> None:
        self._model, self._name = model, name or type(model).__name__
        self._kwargs = {**model_kwargs, **{k: True for k, wanted in outputs.items() if wanted}}
        self._growing: dict[str, torch.Tensor] = {
            k: v for k in _GROWING if (v := model_kwargs.get(k)) is not None
        }
        given, _ = self._kwargs.pop(CACHE_NAME, None), self._kwargs.pop("cache_position", None)
        tensors = {k for k, v in self._kwargs.items() if isinstance(v, torch.Tensor)}
        if unknown := ", ".join(sorted(tensors.difference(_GROWING))):
            raise ValueError(f"generate: expected a prompt of token ids alone, found {unknown}")
        self._use_cache: bool = model_kwargs.get("use_cache") is not False
        self.cache: Any = given if self._use_cache else None
        if self.cache is not None and not hasattr(self.cache, "get_seq_length"):
            raise TypeError(f"{CACHE_NAME}: expected a Cache, found {type(self.cache).__name__}")
        #: Of each layer with a window, before a pass with a draft: keys, values and the number of tokens seen.
        self._windows: dict[int, tuple[Any, Any, int]] = {}
        config = model.config.get_text_config()
        self._window = max(getattr(config, n, None) or 0 for n in ("sliding_window", "attention_chunk_size"))
        mask = self._growing.get("attention_mask")
        self._rope_change = _rope_change(config, 0 if mask is None else int((mask == 0).sum()))
        self.failure = None if self.cache is None else _why_not_forgetting(self.cache)
        #: Tokens whose keys and values the cache holds.
        self._cached = 0 if self.cache is None else int(self.cache.get_seq_length())
        if self._cached >= input_ids.shape[1]:
            raise ValueError(
                f"input_ids: expected more tokens than the {self._cached} of {CACHE_NAME}, "
                f"found {input_ids.shape[1]}"
            )
        self._end = self._cached
        self.steps = 0

    def __call__(self, ids: torch.Tensor, draft: Sequence[int]) -> Any:
        """One pass; ids: [1, n] int64, all so far. The output's last ``len(draft) + 1`` logits are wanted."""
        tokens = torch.cat([ids, ids.new_tensor([list(draft)])], dim=1) if draft else ids
        self._end = tokens.shape[1]
        inputs = self._inputs(tokens)
        # The first pass asks for one more than the last, to see that the model can compute it.
        num_logits = len(draft) + 1
        if self.steps == 0:
            num_logits = max(num_logits, min(2, self._end - self._cached))
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        for layer in self._layers if draft else ():
            if type(layer) in (_WINDOW, _STATIC_WINDOW):
                seen = int(getattr(layer, "cumulative_length_int", layer.cumulative_length))
                stored = [layer.keys, layer.values] if seen else [None, None]
                # A pass writes into static ones, and replaces the others.
                if seen and type(layer) is _STATIC_WINDOW:
                    stored = [layer.keys.clone(), layer.values.clone()]
                self._windows[id(layer)] = stored[0], stored[1], seen
        outputs = self._model(**inputs, return_dict=True)
        if outputs.logits.shape[1] < num_logits:
            raise self._unfit(f"computes the logits of {outputs.logits.shape[1]} tokens, not of {num_logits}")
        self.steps += 1
        # A prompt goes into a cache that is not known yet, and some classes make a new one later.
        if self._use_cache and (self.steps == 1 or outputs.get(CACHE_NAME) not in (None, self.cache)):
            self._take_cache(outputs, tokens)
        return outputs

    def _inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        """What transformers passes to the model for those of `tokens` [1, n] that the cache lacks."""
        end, pending = tokens.shape[1], tokens.shape[1] - self._cached
        more: dict[str, Any] = {name: self._extended(name, end) for name in self._growing}
        if self.cache is not None:
            more[CACHE_NAME] = self.cache
        if "next_sequence_length" in _PREPARATION:
            more["next_sequence_length"] = pending if self._cached else None
        if "cache_position" in _PREPARATION:
            more["cache_position"] = torch.arange(self._cached, end, device=tokens.device)
        if "is_first_iteration" in _PREPARATION:
            more["is_first_iteration"] = self.steps == 0
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(tokens, **{**self._kwargs, **more})
        fed = inputs.get("input_ids")
        # Values are compared once, as it makes the host wait.
        if fed is None or fed.shape[1] not in (pending, end) or (
            self.steps == 0 and not fed.equal(tokens[:, -fed.shape[1] :].to(fed.device))
        ):  # fmt: skip
            raise self._unfit("is fed other inputs than the tokens of the sequence")
        return inputs

    def _extended(self, name: str, end: int) -> torch.Tensor:
        """A growing argument for the first `end` tokens: as it was given, then what `model.generate` appends."""
        given = self._growing[name]
        if given.shape[-1] < end:
            more = end - given.shape[-1] + 256  # what follows does not depend on tokens
            if name == "position_ids":
                behind = given[..., -1:] + torch.arange(1, more + 1, dtype=given.dtype, device=given.device)
            elif name == "token_type_ids":  # mostly the last again, but not for every class
                asked = {name: given, "cache_position": given[0]}
                asked = self._model._update_model_kwargs_for_generation({}, asked)
                behind = asked[name][:, -1:].expand(-1, more)
            else:
                behind = given.new_full((1, more), name == "attention_mask")
            self._growing[name] = given = torch.cat([given, behind], dim=-1)
        return given[..., :end]

    def _take_cache(self, outputs: Any, tokens: torch.Tensor) -> None:
        """Take the cache that a pass over all `tokens` has left, and see what it holds."""
        kept = next((name for name in ALL_CACHE_NAMES if outputs.get(name) is not None), CACHE_NAME)
        cache = outputs.get(kept, self.cache)
        if kept != CACHE_NAME or not (cache is None or hasattr(cache, "get_seq_length")):
            raise self._unfit(f"keeps {kept} in place of a cache")
        # The fullest layer says it: one without attention may count no tokens.
        counting = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")]
        counting = counting or ([] if cache is None else [cache])
        if max((int(layer.get_seq_length()) for layer in counting), default=0) >= self._end:
            self.cache, self.failure = cache, _why_not_forgetting(cache)
        elif self.steps > 1:
            self.cache, self.failure = cache, f"{self._name} dropped its cache"
        else:
            # No cache is filled: right if all tokens are fed in each pass, which transformers does not see to.
            self._cached = self._end
            following = self._inputs(torch.cat([tokens, tokens[:, -1:]], dim=1))
            if following["input_ids"].shape[1] <= self._end:
                raise self._unfit("fills no cache, and reads one token without it; pass use_cache=False")
            self._use_cache, self._cached, self.failure = False, 0, None

    def _unfit(self, why: str) -> ValueError:
        return ValueError(f"model: expected a model that verifies drafts, found {self._name}, which {why}")

    @property
    def _layers(self) -> list[Any]:
        return getattr(self.cache, "layers", []) if self._use_cache else []

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has its full length from the start."""
        return any(isinstance(layer, _PREALLOCATED) for layer in self._layers)

    def room(self, length: int) -> int | None:
        """The most draft tokens that a pass behind `length` tokens may have; None is any number."""
        if self.failure is not None or (self._use_cache and self.cache is None):
            return 0  # a cache that the model makes in its first pass is not known before
        pending = length - self._cached
        rooms = []
        for layer in self._layers:
            if type(layer) is _WINDOW:
                rooms.append(layer.sliding_window - 1 - pending)
            elif type(layer) is _STATIC_WINDOW:
                # A cache shorter than the window has an end like those without one.
                is_short = layer.max_cache_len < self._window
                rooms.append(layer.max_cache_len - (length if is_short else pending))
            elif isinstance(layer, _PREALLOCATED):
                rooms.append(layer.max_cache_len - length)
        if self._rope_change is not None:
            change, always = self._rope_change
            if always or self._cached <= change:
                rooms.append(change - length)
        return max(0, min(rooms)) if rooms else None

    def keep(self, ids: torch.Tensor) -> None:
        """Forget the tokens of the last pass that are not in ``ids[:, :-1]``; the last one was not fed yet."""
        if not self._use_cache:
            return
        length, end = min(ids.shape[1] - 1, self._end), self._end
        self._cached = length
        if length == end:
            return
        if _CROPPED_HERE.isdisjoint(map(type, self._layers)):
            self.cache.crop(length - end)  # negative: so many tokens less
            return
        for layer in self._layers:
            if type(layer) in (_WINDOW, _STATIC_WINDOW):
                _rewind_window(layer, *self._windows[id(layer)], length, end)
            elif type(layer) not in _CROPPED_HERE:
                layer.crop(length - end)
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


def _rope_change(config: Any, padding: int) -> tuple[int, bool] | None:
    """Beyond how many tokens other rotary frequencies are used, and whether each longer pass has its own."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (rope, *rope.values()):
        kind = str(entry.get("rope_type", entry.get("type"))) if isinstance(entry, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            name, most = "original_max_position_embeddings", config.max_position_embeddings
            original = most if "dynamic" in kind else entry.get(name, getattr(config, name, most))
            return original + padding, "dynamic" in kind
    return None


def _why_not_forgetting(cache: Any) -> str | None:
    """Why a cache cannot forget its last tokens, or None where it can.

    A class that adds a way to store (a method ``update...``) must say how to forget (``crop``) itself, or a class
    derived from it must: an inherited `crop` does not know what was added.
    """
    base = cache_utils.Cache
    for kept in (cache, *getattr(cache, "layers", ())):
        kind = type(kept)
        if kind in _CROPPED_HERE:
            continue
        depth = {name: i for i, c in reversed([*enumerate(kind.__mro__)]) for name in vars(c)}
        stores = min((i for name, i in depth.items() if name.startswith("update")), default=-1)
        if kept is not cache:  # a layer that has to record the past is not told to
            says = "activate_past_recording" not in depth and getattr(kept, "is_croppable", True)
        elif hasattr(base, "is_croppable"):  # by default what its layers say
            says = kind.is_croppable is base.is_croppable or kept.is_croppable
        else:
            says = kind.crop is base.crop
        if not says or depth.get("crop", len(depth)) > stores:
            return f"a {kind.__name__} of the cache cannot forget"
    return None


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
        input_ids: the prompt: one sequence of token ids, [n] or [1, n], what a tokenizer returns for it, with its
            masks, or text, which the tokenizer encodes with its special tokens.
        prediction: the predicted output: token ids, or text, which the tokenizer encodes without special tokens.
            None or empty: drafts come from the prompt and the output alone.
        predictor: what drafts instead of a `PredictedOutputTokenPredictor`. It is stopped, not disposed of, and
            gets the prediction in its options.
        tokenizer: for text, for ``stop_strings`` and for predictors that compare vocabularies.
        num_draft_tokens: K, the most draft tokens a pass; ``>= 1``.
        strict: raise what a predictor raises. By default a predictor that fails costs its drafts and no more, as
            `PredictorLoop` describes.
        predictor_timeout: seconds that one call of a predictor of your own may take; None is any number.
        generate_kwargs: as for ``model.generate``, here or in a ``GenerationConfig``: greedy or sampling, one
            sequence, static or dynamic caches, logits processors, streamers, stopping criteria. Drafts are
            verified eagerly: nothing is compiled.

    Returns:
        What ``model.generate`` returns: [1, n + new] int64, or with ``return_dict_in_generate=True`` a
        ``GenerateDecoderOnlyOutput``, with the attribute `predicted_outputs`, a `PredictedOutputs`.

    A streamer gets one token at a time, and stopping criteria are asked behind each token, as in
    ``model.generate``. Scores, logits, attentions and hidden states have one entry a token.

    TypeError, ValueError: arguments of other types; an encoder-decoder or recurrent model, or one that cannot
    verify drafts; beams, more than one sequence, another source of drafts, inputs other than token ids, text
    without a tokenizer, a prediction with ids outside the vocabulary. They are raised before the first token.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder-only model, found {name}, an encoder-decoder")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"model: expected a model with a KV cache, found {name}, whose state cannot go back")
    own = inspect.signature(type(model).generate).parameters
    if "custom_generate" not in own and all(p.kind is not p.VAR_POSITIONAL for p in own.values()):
        raise ValueError(f"model: expected transformers' generate, found {name} with its own")
    _refuse(generate_kwargs.get)
    arguments = {**_encoding(input_ids, tokenizer, model.device), **generate_kwargs}
    ids = arguments.pop("input_ids")
    for key in _GROWING:
        if (value := arguments.get(key)) is not None:
            value = torch.as_tensor(value, device=model.device)
            arguments[key] = value = value[None] if value.ndim == 1 else value
            if (found := list(value.shape))[-2:] != list(ids.shape):
                raise ValueError(f"{key}: expected {list(ids.shape)}, as input_ids, found {found}")
    predicted = encode_prediction(prediction, tokenizer) if prediction is not None else []
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", None)
    check_token_ids("prediction", np.asarray(predicted, dtype=np.int64), vocab_size or 1 << 31)
    drafting = predictor if predictor is not None else PredictedOutputTokenPredictor()
    loop = PredictorLoop(
        drafting,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        strict=strict,
        timeout=predictor_timeout,
    )
    # transformers 5 does not hand the streamer on, and its own criterion for stop strings gets no tokenizer.
    decode = functools.partial(_decode, loop, predicted, name, tokenizer, arguments.get("streamer"))
    configs = arguments, vars(arguments.get("generation_config") or model), vars(model.generation_config)
    if strings := next(filter(None, (config.get("stop_strings") for config in configs)), None):
        if tokenizer is None:
            raise ValueError("stop_strings: expected a tokenizer beside them")
        criteria = [*(arguments.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
        arguments |= {"stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}
    try:
        return model.generate(ids, custom_generate=decode, **arguments)
    finally:
        loop.stop()
        if predictor is None:
            drafting.dispose()


def _decode(
    loop: PredictorLoop,
    prediction: list[int],
    model_name: str,
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
    _refuse(lambda name: getattr(config, name, None))
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
    forward = DraftForward(model, input_ids, model_kwargs, model_name, **of_model)
    mask = model_kwargs.get("attention_mask")
    prompt = input_ids[0] if mask is None else input_ids[0][mask[0, : input_ids.shape[1]].bool()]
    longest: int | None = config.max_length
    loop.start(prompt.tolist(), prediction, max_len=longest, tokenizer=tokenizer, sampling=config)
    ids, finished = input_ids, False
    while not finished:
        start = ids.shape[1]
        rooms = [forward.room(start), None if longest is None else longest - start - 1]
        draft = loop.draft(min((room for room in rooms if room is not None), default=None))
        outputs = forward(ids, draft)
        if forward.failure is not None:
            loop.fail(forward.failure)
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
    result = GenerateDecoderOnlyOutput(sequences=ids, **{CACHE_NAME: forward.cache}, **record)
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


def _refuse(value_of: Callable[[str], Any]) -> None:
    """Raise ValueError for an option that chooses other passes or drafts than those made here."""
    for name in _REFUSED:
        if (value := value_of(name)) is not None and value is not False:
            raise ValueError(f"{name}: not together with gpu_align.hf.generate")
    if value_of("cache_implementation") == "paged":
        raise ValueError("cache_implementation: expected one for a single sequence, found 'paged'")


def _encoding(input_ids: Any, tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """``input_ids``, [1, n] int64, ``n >= 1``, and what else belongs to them."""
    encoded = {"input_ids": input_ids}
    if isinstance(input_ids, str):
        if tokenizer is None:
            raise ValueError("input_ids: expected token ids, or a tokenizer for the text")
        encoded = {k: v for k, v in tokenizer(input_ids).items() if k in ("input_ids", "attention_mask")}
    elif isinstance(input_ids, Mapping):
        encoded = dict(input_ids)
    ids = encoded.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        ids = torch.tensor(encode_prediction(ids, name="input_ids"), dtype=torch.int64)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected one sequence of tokens, found the shape {list(ids.shape)}")
    return {**encoded, "input_ids": ids.to(device, torch.int64)}
