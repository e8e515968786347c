"""`gpu_align.hf.generate` writes what `model.generate` writes, in fewer passes, whatever is predicted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("numba")  # plain Python is a hundred times slower

import transformers
from transformers.cache_utils import StaticCache, StaticLayer

from gpu_align import hf
from gpu_align.predictors import PredictedOutputTokenPredictor
from tests.gpu_align.tiny_models import (
    MODELS,
    VOCAB,
    encoder_decoder,
    predictions,
    reference,
    text,
    tiny,
    trained,
    untrained,
)


def ours(model: Any, prompt: list[int], prediction: Any, **options: Any) -> Any:
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "strict": True, "return_dict_in_generate": True, **options}
    return hf.generate(model, ids, prediction=prediction, attention_mask=torch.ones_like(ids), **settings)


@pytest.mark.parametrize("kind", MODELS)
def test_a_verbatim_prediction_takes_as_few_passes_as_can_be(kind: str) -> None:
    model, prompt = trained(kind), text(random.Random(3), 12)
    expected = reference(model, prompt, max_new_tokens=128)
    logits: list[int] = []  # of each pass
    hook = model.register_forward_hook(lambda _, __, output: logits.append(output.logits.shape[1]))
    try:
        found = ours(model, prompt, expected[0, len(prompt) :], max_new_tokens=128, num_draft_tokens=16)
    finally:
        hook.remove()
    assert found.sequences.tolist() == expected.tolist()
    assert len(logits) <= 1 + math.ceil(127 / 17)
    assert max(logits) == 17  # those behind the prompt and its draft, none inside the prompt
    assert (found.predicted_outputs.steps, found.predicted_outputs.rejected) == (len(logits), 0)


SAMPLED = {"do_sample": True, "temperature": 1.3, "top_p": 0.9}
#: Options of `generate`, of what the model writes without them.
OPTIONS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "greedy": lambda _: {},
    "sampling": lambda _: SAMPLED,
    "an end token": lambda output: {"eos_token_id": output[7]},
    "a later end token": lambda output: {"min_new_tokens": 9, "eos_token_id": output[4]},
    "a length": lambda _: {"max_new_tokens": None, "max_length": 9 + 13},
    "one token": lambda _: {"max_new_tokens": 1},
    "no cache": lambda _: {"use_cache": False},
    "processors": lambda _: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_have_the_effect_that_they_have_without_predictions(what: str) -> None:
    """Sampling, from the same seed, whatever is predicted: a draft is accepted only where it is what is drawn."""
    model, rng = trained("llama"), random.Random(8)
    prompt = text(rng, 9)
    plain = reference(model, prompt, max_new_tokens=24)[0, 9:].tolist()
    options = {"max_new_tokens": 24, **OPTIONS[what](plain)}
    for seed in range(3 if what == "sampling" else 1):
        torch.manual_seed(seed)
        expected = reference(model, prompt, **options)
        for prediction in predictions(expected[0, 9:].tolist(), rng).values():
            torch.manual_seed(seed)
            assert ours(model, prompt, prediction, **options).sequences.equal(expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_a_seed_gives_one_text_whatever_is_predicted(temperature: float) -> None:
    """That of `model.generate` with this seed; the generators of the caller stay as they are."""
    rng = random.Random(8)
    model, prompt = trained("llama"), text(rng, 9)
    options = {"max_new_tokens": 40, **SAMPLED, "temperature": temperature}
    for seed in (-7, 2**40):
        torch.manual_seed(seed)
        expected, state = reference(model, prompt, **options), torch.get_rng_state()
        for prediction in predictions(expected[0, 9:].tolist(), rng).values():
            found = ours(model, prompt, prediction, seed=seed, **options)
            assert found.sequences.equal(expected)
            assert torch.get_rng_state().equal(state)
    with pytest.raises(ValueError, match="seed: expected 64 bits"):
        ours(model, prompt, None, seed=2**63)


class Calls(transformers.StoppingCriteria):
    """What a streamer and a stopping criterion were given; as a criterion it stops at a token."""

    def __init__(self, last: int) -> None:
        self.calls: list[Any] = []
        self.last = last

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.flatten().tolist())

    def end(self) -> None:
        self.calls.append("end")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls.append(input_ids.shape[1])
        return torch.tensor([input_ids[0, -1] == self.last])


def test_streamers_and_criteria_are_called_as_without_predictions() -> None:
    model, prompt = trained("llama"), text(random.Random(8), 9)
    output = reference(model, prompt, max_new_tokens=30)[0, 9:].tolist()
    streams, criteria = [[Calls(output[11]) for _ in range(2)] for _ in range(2)]
    options = [
        {"max_new_tokens": 30, "streamer": streams[i], "stopping_criteria": [criteria[i]]} for i in range(2)
    ]
    expected = reference(model, prompt, **options[0])
    found = ours(model, prompt, output, **options[1])
    assert found.sequences.equal(expected)
    assert streams[0].calls == streams[1].calls
    assert criteria[0].calls == criteria[1].calls
    assert found.predicted_outputs.rejected == 0  # what was drafted behind the end is not counted


def test_outputs_have_one_entry_a_token() -> None:
    model, prompt = trained("llama"), text(random.Random(10), 9)
    wanted = ("scores", "logits", "attentions", "hidden_states")
    options = {f"output_{name}": True for name in wanted}
    expected = reference(model, prompt, max_new_tokens=12, return_dict_in_generate=True, **options)
    output = expected.sequences[0, 9:].tolist()
    found = ours(model, prompt, [*output[:5], 1, *output[6:]], max_new_tokens=12, **options)
    assert type(found) is type(expected)
    for name in wanted:
        ones, others = getattr(expected, name), getattr(found, name)
        assert len(ones) == len(others) == 12
        for one, other in zip(ones, others, strict=True):
            pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            for a, b in pairs:
                assert a.shape == b.shape, name
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert int(found.past_key_values.get_seq_length()) == int(expected.past_key_values.get_seq_length())


class Odd(transformers.cache_utils.DynamicLayer):
    """A layer that stores in a way of its own, which the `crop` that it inherits does not know."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


def odd_cache() -> Any:
    made = transformers.DynamicCache()
    made.layers = [Odd() for _ in range(2)]
    return made


def cached(model: Any, kind: type[Any] = transformers.DynamicCache, tokens: int = 3, **settings: Any) -> Any:
    """A cache that holds the first tokens of `PROMPT`."""
    cache = kind(**settings)
    if tokens:
        model(PROMPT[:, :tokens], past_key_values=cache, use_cache=True)
    return cache


class Noted(transformers.DynamicCache):
    """A class of one's own that stores and forgets as its base does."""


class Beside(transformers.DynamicCache):
    """With state beside its layers."""

    is_croppable = False

    def crop(self, *_: Any) -> None:
        raise RuntimeError("no crop")


PROMPT = torch.tensor([[5, 9, 11, 5, 9, 12, 7, 5, 9]])
ONES = torch.ones_like(PROMPT)
#: Options of `generate` for a model and its output: same text; whether drafts are verified.
SAME: dict[str, tuple[str, Callable[[Any, list[int]], dict[str, Any]], bool]] = {
    "a short cache, and an end before it": (
        "llama",
        lambda m, out: {
            "past_key_values": StaticCache(config=m.config, max_cache_len=9 + 7),
            "eos_token_id": next(token for i, token in enumerate(out) if i > 3 and token not in out[:i]),
        },
        hasattr(StaticLayer, "crop"),
    ),
    "nested ids": ("llama", lambda _, __: {"input_ids": PROMPT.tolist()}, True),
    "a list of a tensor": ("llama", lambda _, __: {"input_ids": [PROMPT[0]]}, True),
    "windows in a cache for none": ("mistral", lambda m, _: {"past_key_values": cached(m)}, True),
    "a static cache with windows": (
        "mistral", lambda m, _: {"past_key_values": StaticCache(config=m.config, max_cache_len=99)}, False,
    ),
    "static caches by name": (
        "llama", lambda m, _: {"cache_implementation": "static"}, hasattr(StaticLayer, "crop"),
    ),
    "a cache class of one's own": ("llama", lambda m, _: {"past_key_values": cached(m, Noted)}, True),
    "state beside the layers": ("llama", lambda m, _: {"past_key_values": cached(m, Beside)}, False),
    "layers of one's own": ("llama", lambda _, __: {"past_key_values": odd_cache()}, False),
    "an encoding": ("llama", lambda _, __: {"input_ids": transformers.BatchEncoding({"input_ids": PROMPT})}, True),
    "an encoding of lists, with its mask": (
        "llama",
        lambda _, __: {
            "input_ids": transformers.BatchEncoding(
                {"input_ids": PROMPT.tolist(), "attention_mask": [[0, 0, *[1] * 7]]}
            )
        },
        True,
    ),
    "a flat mask": ("llama", lambda _, __: {"attention_mask": [0, 0, *[1] * 7]}, True),
    "token types": ("gpt2", lambda _, __: {"token_type_ids": torch.tensor([[0] * 5 + [1] * 4])}, True),
    "no cache in the configuration": (
        "llama",
        lambda _, __: {
            "max_new_tokens": None, "do_sample": None,
            "generation_config": transformers.GenerationConfig(use_cache=False, max_new_tokens=24),
        },
        True,
    ),
    "stop strings in the configuration": (
        "llama",
        lambda _, out: {
            "max_new_tokens": None, "do_sample": None, "tokenizer": word_tokenizer(),
            "generation_config": transformers.GenerationConfig(stop_strings=[f"w{out[6]}"], max_new_tokens=24),
        },
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_inputs_and_caches_as_people_have_them(what: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, options, drafts = SAME[what]
    model = tiny("GPT2LMHeadModel", {}) if kind == "gpt2" else trained(kind)
    plain = {"input_ids": PROMPT, "attention_mask": ONES, "max_new_tokens": 24, "do_sample": False}
    alone = model.generate(**plain)[0, 9:].tolist()
    given = options(model, alone)
    # What `model.generate` takes.
    encoded = given.get("input_ids") if isinstance(given.get("input_ids"), transformers.BatchEncoding) else {}
    tensors = {name: torch.as_tensor(value).reshape(1, -1) for name, value in encoded.items()}
    if "attention_mask" in given:
        tensors["attention_mask"] = torch.tensor([given["attention_mask"]])
    expected = model.generate(**{**plain, **given, "input_ids": PROMPT, **tensors})
    output = expected[0, 9:].tolist()
    for prediction in (output, [*output[:4], 1, *output[5:]]):
        again = {**plain, **options(model, alone)}  # with a new cache
        if encoded:
            del again["attention_mask"]
        found = hf.generate(model, prediction=prediction, return_dict_in_generate=True, **again)
        assert found.sequences.tolist() == expected.tolist()
        assert (found.predicted_outputs.accepted > 0) is drafts
        assert (found.predicted_outputs.failure is None) is drafts
    told = [record for record in caplog.records if record.name.startswith("gpu_align")]
    assert len(told) == (0 if drafts else 2)


class Port(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """A class that keeps no cache: the next token follows from all tokens."""

    config_class = transformers.GPT2Config
    all_logits = True
    reads_all = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(VOCAB, VOCAB)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        if self.reads_all:
            return {"input_ids": input_ids}
        return dict(super().prepare_inputs_for_generation(input_ids, **kwargs))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
        logits = self.embed(input_ids).cumsum(1).sin() * 9
        kept = logits if self.all_logits else logits[:, -1:]
        return transformers.modeling_outputs.CausalLMOutput(logits=kept)


def port(**what: bool) -> Any:
    torch.manual_seed(4)
    model = Port(transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, n_layer=1))
    for name, value in what.items():
        setattr(model, name, value)
    return model


def test_a_model_without_a_cache_is_fed_all_tokens() -> None:
    model = port()
    expected = model.generate(PROMPT, attention_mask=ONES, max_new_tokens=24, do_sample=False)
    for prediction in (expected[0, 9:].tolist(), [7] * 24):
        assert ours(model, PROMPT[0].tolist(), prediction, max_new_tokens=24).sequences.equal(expected)


def prefixed(peft: Any = None) -> Any:
    """A model after prefix tuning, by `peft` or as it: the cache begins with tokens that are not in the prompt,
    and no pass after the first is fed more than one token."""
    model = untrained("llama", 0)
    if peft is not None:
        torch.manual_seed(1)
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        return peft.get_peft_model(model, config).eval()
    prepare = model.prepare_inputs_for_generation

    def with_prefix(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        cache = inputs.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            inputs["past_key_values"] = transformers.DynamicCache()
            model(PROMPT[:, :5], past_key_values=inputs["past_key_values"], use_cache=True)
        elif cache.get_seq_length() >= inputs["input_ids"].shape[1]:
            inputs["input_ids"] = inputs["input_ids"][:, -1:]
        return {
            k: v for k, v in inputs.items() if k not in ("position_ids", "attention_mask")
        }  # of all tokens

    model.prepare_inputs_for_generation = with_prefix
    return model


@pytest.mark.parametrize("by", ["itself", "peft"])
def test_prefix_tuning_is_refused_before_the_first_token(by: str) -> None:
    model = prefixed(pytest.importorskip("peft") if by == "peft" else None)
    options = {"attention_mask": ONES, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(input_ids=PROMPT, **options)[0, 9:]
    assert len(expected) == 24
    for prediction in (expected, [7] * 24, None):
        streamer = Calls(-1)
        with pytest.raises(ValueError, match="LlamaForCausalLM, which is fed other inputs"):
            hf.generate(model, PROMPT, prediction=prediction, streamer=streamer, **options)
        assert streamer.calls == [PROMPT[0].tolist()]


def test_a_compiled_model_and_more_drafts_than_are_made() -> None:
    """`model.generate` of a compiled model is that of the model in it. 256 drafts a pass are the most."""
    model, prompt = trained("llama"), text(random.Random(3), 9)
    expected = reference(model, prompt, max_new_tokens=300)
    for k in (256, 257, 1000):
        found = ours(torch.compile(model), prompt, expected[0, 9:], max_new_tokens=300, num_draft_tokens=k)
        assert found.sequences.equal(expected)
        assert (found.predicted_outputs.steps, found.predicted_outputs.rejected) == (2, 0)


#: A cache that holds all nine tokens of the prompt: the model, the cache, and why it is refused.
WHOLE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "dynamic": ("llama", lambda m: cached(m, tokens=9), ""),
    "a class of one's own": ("llama", lambda m: cached(m, Noted, tokens=9), ""),
    "a window that is not full": ("mistral", lambda m: cached(m, tokens=9, config=m.config), ""),
    "a full window": (
        "tiny window",
        lambda m: cached(m, tokens=9, config=m.config),
        "more tokens than the 9",
    ),
    "state beside the layers": ("llama", lambda m: cached(m, Beside, tokens=9), "more tokens than the 9"),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_cache_of_the_whole_prompt_gives_its_last_token_back(what: str) -> None:
    """The text is that without a cache. (`model.generate` of transformers 4 fails, that of 5 reads the prompt
    twice.)"""
    kind, cache, why = WHOLE[what]
    model = tiny("MistralForCausalLM", {"sliding_window": 6}) if kind == "tiny window" else trained(kind)
    expected = reference(model, PROMPT[0].tolist(), max_new_tokens=24)
    for prediction in (expected[0, 9:], [7] * 24):
        options = {"max_new_tokens": 24, "past_key_values": cache(model)}
        if why:
            with pytest.raises(ValueError, match=why):
                ours(model, PROMPT[0].tolist(), prediction, **options)
            continue
        found = ours(model, PROMPT[0].tolist(), prediction, **options)
        assert found.sequences.equal(expected)
        assert int(found.past_key_values.get_seq_length()) == 9 + 23


_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
ROPES: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "longrope": ({"original_max_position_embeddings": 16, **_FACTORS}, [7, 0, 0]),
    "dynamic": ({"factor": 4.0}, [55, 48, 0]),
    "linear": ({"factor": 4.0}, [None] * 3),
}


@pytest.mark.parametrize("kind", ROPES)
def test_drafts_end_where_rotary_frequencies_change(kind: str) -> None:
    """A draft beyond would change what the model computes of the tokens before it."""
    settings, rooms = ROPES[kind]
    model = untrained("llama", 0, max_position_embeddings=64, rope_scaling={"rope_type": kind, **settings})
    forward = hf.DraftForward(model, PROMPT, {hf.CACHE_NAME: transformers.DynamicCache()})
    assert [forward.room(length) for length in (9, 16, 70)] == rooms


@pytest.mark.parametrize("mode", [(True, False), (False, True)])
def test_a_predictor_is_used_inside_and_outside_of_inference_mode(mode: tuple[bool, bool]) -> None:
    model, prompt = trained("llama"), text(random.Random(21), 9)
    output = reference(model, prompt, max_new_tokens=16)[0, 9:].tolist()
    predictor = PredictedOutputTokenPredictor(output)
    for inside in mode:
        with torch.inference_mode(inside):
            found = ours(model, prompt, None, max_new_tokens=16, predictor=predictor)
        assert (found.predicted_outputs.steps, found.predicted_outputs.rejected) == (1, 0)


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {f"w{i}": i for i in range(VOCAB - 1)} | {"abcdef": VOCAB - 1}  # StopStringCriteria encodes this
    words = Tokenizer(models.WordLevel(names, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def test_text_and_ids() -> None:
    model, prompt, tokenizer = trained("llama"), text(random.Random(15), 9), word_tokenizer()
    expected = reference(model, prompt, max_new_tokens=20)
    output = expected[0, 9:]
    written, asked = tokenizer.decode(output), tokenizer.decode(prompt)
    options = {"max_new_tokens": 20, "do_sample": False, "strict": True}
    prompts = [prompt, torch.tensor(prompt), torch.tensor([prompt]), asked, asked, asked]
    forms = [output, output[None], output.tolist(), tuple(output.tolist()), output.numpy(), written]
    for input_ids, prediction in zip(prompts, forms, strict=True):
        found = hf.generate(model, input_ids, prediction=prediction, tokenizer=tokenizer, **options)
        assert found.equal(expected)
    stop = {"tokenizer": tokenizer, "stop_strings": [tokenizer.decode(output[5:7])]}
    stopped = hf.generate(model, asked, prediction=written, **stop, **options)
    assert stopped.shape[1] < expected.shape[1]
    assert stopped.equal(reference(model, prompt, max_new_tokens=20, **stop))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "beams": ({"num_beams": 2}, ValueError, "without beams"),
    "many": ({"num_return_sequences": 2, "do_sample": True}, ValueError, "one sequence"),
    "batch": ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, ValueError, "one sequence"),
    "assistant": ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens: not together"),
    "custom": ({"custom_generate": "x/y"}, ValueError, "custom_generate: not together"),
    "chunks": ({"prefill_chunk_size": 2}, ValueError, "prefill_chunk_size: not together"),
    "ranks": ({"synced_gpus": True}, ValueError, "synced_gpus: not together"),
    "text prediction": ({"prediction": "w1"}, ValueError, "prediction: .*tokenizer"),
    "text prompt": ({"input_ids": "w1"}, ValueError, "input_ids: .*tokenizer"),
    "stop strings": ({"stop_strings": ["w1"]}, ValueError, "stop_strings: expected a tokenizer"),
    "bytes": ({"prediction": b"w1"}, TypeError, "prediction: expected a flat sequence"),
    "words": ({"prediction": ["a"]}, TypeError, "prediction: expected a flat sequence of integers"),
    "matrix": ({"prediction": torch.ones(2, 2)}, ValueError, "one sequence"),
    "outside": ({"prediction": [1, VOCAB], "strict": False}, ValueError, rf"prediction\[1\].*{VOCAB}"),
    "no drafts": ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected 1 or more"),
    "no predictor": ({"predictor": 3}, TypeError, "expected a TokenPredictor, found int"),
    "floats": ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: expected a flat"),
    "two rows": ({"input_ids": [[1, 2], [3, 4]]}, TypeError, "input_ids: expected a flat"),
    "no tokens": ({"input_ids": []}, ValueError, "input_ids: expected one sequence of tokens"),
    "another encoding": ({"input_ids": {"pixel_values": 1}}, TypeError, "input_ids: .*found NoneType"),
    "new tokens alone": (
        {"past_key_values": transformers.DynamicCache(), "attention_mask": torch.ones(1, 5)},
        ValueError, r"attention_mask: expected \[1, 3\]",
    ),
    "lookup in the configuration": (
        {"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)},
        ValueError, "prompt_lookup_num_tokens: not together",
    ),
    "chunks in the configuration": (
        {"generation_config": transformers.GenerationConfig(prefill_chunk_size=2)},
        ValueError, "prefill_chunk_size: not together",
    ),
    "layers of one's own": (
        {"past_key_values": odd_cache(), "strict": True}, ValueError, "Odd of the cache cannot forget"
    ),
    "a longer cache": (
        {"past_key_values": cached(untrained("llama", 0), tokens=5)}, ValueError, "more tokens than the"
    ),
    "paged": ({"cache_implementation": "paged"}, ValueError, "cache_implementation: expected one for"),
    "last logits": ({"model": port(all_logits=False)}, ValueError, "found Port, which computes the logits of 1"),
    "one token without a cache": ({"model": port(reads_all=False)}, ValueError, "Port, which fills no cache"),
    "T5": ({"model": encoder_decoder()}, ValueError, "found T5ForConditionalGeneration, an encoder-decoder"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused(what: str) -> None:
    given, kind, message = BAD[what]
    arguments = {"model": trained("llama"), "input_ids": [1, 2, 3], "max_new_tokens": 4, **given}
    with pytest.raises(kind, match=message):
        hf.generate(**arguments)
