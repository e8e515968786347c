"""`generate`: predicted outputs for transformers models, through transformers' own extension points."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from ...drafter.checks import check_token_ids
from ...ops.errors import check_int
from ..base import TokenPredictor
from ..loop import PredictorLoop
from ..predicted_output import PredictedOutputTokenPredictor, encode_prediction
from .forward import CACHE_NAME, GROWING, DraftForward

#: Arguments of ``model.generate`` that choose another source of drafts, another prompt or other passes.
_REFUSED = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "inputs", "inputs_embeds",
    "prefill_chunk_size", "synced_gpus", "token_healing",
)  # fmt: skip


@dataclass(frozen=True)
class PredictedOutputs:
    """Counts of one generation's drafts."""

    steps: int  # forward passes of the model, prefill included
    accepted: int  # draft tokens that the model wrote
    rejected: int  # draft tokens that it did not; those after the last token are neither
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
    seed: int | None = None,
    strict: bool = False,
    **generate_kwargs: Any,
) -> Any:
    """``model.generate(input_ids, ...)`` in fewer forward passes.

    ::

        while not finished:
            draft = predictor.predict_tokens()[:K]
            logits = model(tokens that the cache lacks, then the draft)
            for each position of the draft, and the one after it:
                token = chosen from the processed logits, as model.generate chooses it
                append token, give it to the streamer, ask the stopping criteria
                stop here where the token is not the draft's, or the generation has finished

    The tokens are those of ``model.generate``, but where rounding decides between two: a pass over several tokens
    may round otherwise. Sampling draws once for each token, in order, and accepts a draft token if that is drawn:
    the distribution is the model's, and a seed's text is the same with any prediction. The first pass verifies a
    draft together with the prompt.

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
        seed: of 64 bits, for sampling: the text is that of ``model.generate`` after ``torch.manual_seed(seed)``,
            and PyTorch's own generators stay as they are. None: these are used, as ``model.generate`` does.
        strict: raise what a predictor raises. By default a predictor that fails costs its drafts and no more, as
            `PredictorLoop` describes.
        generate_kwargs: as for ``model.generate``, here or in a ``GenerationConfig``: greedy or sampling, one
            sequence, logits processors, streamers, stopping criteria. Drafts are verified with dynamic caches.

    Returns:
        What ``model.generate`` returns: [1, n + new] int64, or with ``return_dict_in_generate=True`` a
        ``GenerateDecoderOnlyOutput``, with the attribute `predicted_outputs`, a `PredictedOutputs`.

    Scores, logits, attentions and hidden states have one entry a token.

    TypeError, ValueError: arguments of other types; an encoder-decoder or recurrent model, or one that cannot
    verify drafts; beams, more than one sequence, another source of drafts, inputs other than token ids, text
    without a tokenizer, a prediction with ids outside the vocabulary. They are raised before the first token.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder-only model, found {name}, an encoder-decoder")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"model: expected a model with a KV cache, found {name}, whose state cannot go back")
    own = inspect.signature(model.generate).parameters
    if "custom_generate" not in own and all(p.kind is not p.VAR_POSITIONAL for p in own.values()):
        raise ValueError(f"model: expected transformers' generate, found {name} with its own")
    _refuse(generate_kwargs.get)
    if seed is not None:
        check_int("seed", seed, -(2**63), 2**63 - 1, "64 bits")
    arguments = {**_encoding(input_ids, tokenizer, model.device), **generate_kwargs}
    ids = arguments.pop("input_ids")
    for key in GROWING:
        if (value := arguments.get(key)) is not None:
            value = torch.as_tensor(value, device=model.device)
            arguments[key] = value = value[None] if value.ndim == 1 else value
            if (found := list(value.shape))[-2:] != list(ids.shape):
                raise ValueError(f"{key}: expected {list(ids.shape)}, as input_ids, found {found}")
    predicted = encode_prediction(prediction, tokenizer) if prediction is not None else []
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", None)
    check_token_ids("prediction", np.asarray(predicted, dtype=np.int64), vocab_size or 1 << 31)
    drafting = predictor if predictor is not None else PredictedOutputTokenPredictor()
    loop = PredictorLoop(drafting, num_draft_tokens=num_draft_tokens, vocab_size=vocab_size, strict=strict)
    # transformers 5 does not hand the streamer on, and its own criterion for stop strings gets no tokenizer.
    noise = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    decode = functools.partial(_decode, loop, predicted, tokenizer, arguments.get("streamer"), noise)
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
    tokenizer: Any,
    given_streamer: Any,
    noise: torch.Generator | None,
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
    names = ("scores", "logits", "attentions", "hidden_states") if config.return_dict_in_generate else ()
    #: What the result has one entry a token of.
    record: dict[str, tuple[Any, ...]] = {name: () for name in names if getattr(config, f"output_{name}")}
    of_model = {f"output_{name}": name in record for name in ("attentions", "hidden_states")}
    forward = DraftForward(model, input_ids, model_kwargs, **of_model)
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
                probs = scores.softmax(dim=-1)
                token = torch.multinomial(probs, num_samples=1, generator=noise).squeeze(1)
            else:
                token = scores.argmax(dim=-1)
            ids = torch.cat([ids, token[:, None]], dim=1)
            if given_streamer is not None:
                given_streamer.put(token.cpu())
            of_token = {"scores": scores, "logits": raw}
            for name, entries in record.items():
                if name not in of_token:
                    of_token[name] = _layers_of_token(name, outputs, len(draft) - i, not entries)
                record[name] += (of_token[name],)
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


def _layers_of_token(name: str, outputs: Any, later: int, is_first: bool) -> tuple[Any, ...]:
    """Attentions or hidden states of the token with `later` tokens of its pass after it, of each layer.

    Those of the first token have the rows of the prompt before it, too.
    """
    dim = 2 if name == "attentions" else 1
    layers = []
    for layer in getattr(outputs, name) or ():
        row = layer.shape[dim] - 1 - later
        start = 0 if is_first else row
        rows = layer.narrow(dim, start, row + 1 - start)
        layers.append(rows[..., : rows.shape[-1] - later] if name == "attentions" else rows)
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
