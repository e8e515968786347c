"""`gpu_align.hf.generate` writes what `model.generate` writes, in fewer passes, whatever is predicted."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("numba")  # plain Python is a hundred times slower

import transformers

from gpu_align import hf
from gpu_align.predictors import DisposedError, TokenPredictor
from tests.gpu_align.tiny_models import MODELS, VOCAB, predictions, text, trained, untrained

NEW = 32


def reference(model: Any, prompt: list[int], **options: Any) -> torch.Tensor:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **options})


def ours(model: Any, prompt: list[int], prediction: Any, **options: Any) -> Any:
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "strict": True, "return_dict_in_generate": True, **options}
    return hf.generate(model, ids, prediction=prediction, attention_mask=torch.ones_like(ids), **settings)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_output_is_that_of_the_model(kind: str, cache: str | None) -> None:
    """200 generations with dynamic caches, and some with static ones."""
    model, rng = trained(kind), random.Random(f"{kind} {cache}")
    steps: Counter[str] = Counter()
    num_prompts = 25 if cache is None else 4
    for _ in range(num_prompts):
        prompt = text(rng, rng.randrange(1, 40))
        expected = reference(model, prompt, max_new_tokens=NEW, cache_implementation=cache)
        output = expected[0, len(prompt) :].tolist()
        for name, prediction in predictions(output, rng).items():
            found = ours(model, prompt, prediction, max_new_tokens=NEW, cache_implementation=cache)
            assert found.sequences.tolist() == expected.tolist(), (name, prompt)
            counts = found.predicted_outputs
            assert counts.failure is None
            assert counts.steps + counts.accepted >= NEW
            steps[name] += counts.steps
    assert steps["edited"] < steps["unrelated"]
    if (kind, cache) != ("mistral", "static"):  # of transformers 4.56 these windows end the drafts
        assert steps["verbatim"] <= num_prompts * 4
        assert steps["edited"] < 0.5 * num_prompts * NEW


@pytest.mark.parametrize("kind", MODELS)
def test_a_verbatim_prediction_takes_as_few_passes_as_can_be(kind: str) -> None:
    model, prompt = trained(kind), text(random.Random(3), 12)
    expected = reference(model, prompt, max_new_tokens=256)
    logits: list[int] = []  # of each pass
    hook = model.register_forward_hook(lambda _, __, output: logits.append(output.logits.shape[1]))
    try:
        found = ours(model, prompt, expected[0, len(prompt) :], max_new_tokens=256, num_draft_tokens=16)
    finally:
        hook.remove()
    assert found.sequences.tolist() == expected.tolist()
    assert len(logits) <= 1 + math.ceil(255 / 17)
    assert max(logits) == 17  # those behind the prompt and its draft, none inside the prompt
    assert (found.predicted_outputs.steps, found.predicted_outputs.rejected) == (len(logits), 0)


def test_sampling_keeps_the_distribution() -> None:
    """Chi-square over 5,000 draws, by the rank of the token among those that it is drawn from."""
    model, prompt = trained("llama"), text(random.Random(4), 6)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 5, "max_new_tokens": 100}
    torch.manual_seed(11)
    prediction = reference(model, prompt, **options)[0, 6:]
    observed, expected = torch.zeros(5), torch.zeros(5)
    accepted = rejected = 0
    for _ in range(50):
        found = ours(model, prompt, prediction, **options)
        accepted += found.predicted_outputs.accepted
        rejected += found.predicted_outputs.rejected
        with torch.no_grad():
            logits = model(found.sequences).logits[0, 5:-1]  # [100, vocab]: what each token was drawn from
        best = logits.topk(5)
        expected += (best.values / 1.5).softmax(-1).sum(0)
        drawn = found.sequences[0, 6:, None] == best.indices
        assert drawn.any(-1).all()
        observed += drawn.sum(0)
        prediction = found.sequences[0, 6:]  # another sample: often right, often not
    assert observed.sum() == 5000
    assert accepted > 500
    assert rejected > 500
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < 18.5  # 4 degrees of freedom, p = 0.001


def test_sampling_with_a_seed_writes_the_same_text() -> None:
    model, rng = trained("llama"), random.Random(6)
    for seed in range(5):
        prompt = text(rng, 10)
        options = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 24}
        torch.manual_seed(seed)
        expected = reference(model, prompt, **options)
        for prediction in predictions(expected[0, 10:].tolist(), rng).values():
            torch.manual_seed(seed)
            assert ours(model, prompt, prediction, **options).sequences.tolist() == expected.tolist()


class Stream:
    """What a streamer was given."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_sees_what_it_sees_without_predictions() -> None:
    model, prompt = trained("llama"), text(random.Random(7), 9)
    streams = Stream(), Stream()
    expected = reference(model, prompt, max_new_tokens=20, streamer=streams[0])
    ours(model, prompt, expected[0, 9:], max_new_tokens=20, streamer=streams[1])
    assert streams[0].got == streams[1].got
    assert (streams[0].ended, streams[1].ended) == (1, 1)
    ours(model, prompt, [], max_new_tokens=20, streamer=Stream())


def test_the_generation_stops_where_it_stops_without_predictions() -> None:
    """At an end token, at a criterion in the middle of a draft, at the longest length, after a number of calls."""
    model, prompt = trained("llama"), text(random.Random(8), 9)
    output = reference(model, prompt, max_new_tokens=30)[0, 9:].tolist()

    class Once(transformers.StoppingCriteria):
        def __init__(self) -> None:
            self.calls: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.calls.append(input_ids.shape[1])
            return torch.tensor([input_ids[0, -1] == output[11]])

    first, second = Once(), Once()
    for stop in (
        {"eos_token_id": output[7]},
        {"max_length": 9 + 13},
        {"max_new_tokens": 1},
        {"min_new_tokens": 9, "eos_token_id": output[4], "max_new_tokens": 30},
    ):
        options = {"max_new_tokens": 30, **stop} if "max_length" not in stop else stop
        expected = reference(model, prompt, **options)
        assert ours(model, prompt, output, **options).sequences.tolist() == expected.tolist()
    expected = reference(model, prompt, max_new_tokens=30, stopping_criteria=[first])
    found = ours(model, prompt, output, max_new_tokens=30, stopping_criteria=[second])
    assert found.sequences.tolist() == expected.tolist()
    assert first.calls == second.calls
    assert found.predicted_outputs.rejected == 0  # what was drafted behind the end is not counted


def test_processors_and_their_order() -> None:
    model, prompt = trained("llama"), text(random.Random(9), 9)
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "max_new_tokens": 30}
    expected = reference(model, prompt, **options)
    for prediction in (expected[0, 9:], []):
        assert ours(model, prompt, prediction, **options).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("cache", [None, "static"])
def test_outputs_have_one_entry_a_token(cache: str | None) -> None:
    model, prompt = trained("llama"), text(random.Random(10), 9)
    wanted = ("scores", "logits", "attentions", "hidden_states")
    options = {f"output_{name}": True for name in wanted} | {"cache_implementation": cache}
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


def test_a_cache_of_ones_own_is_continued() -> None:
    model, prompt = trained("llama"), text(random.Random(12), 20)
    expected = reference(model, prompt, max_new_tokens=16)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt[:12]]), past_key_values=cache, use_cache=True)
    found = ours(model, prompt, expected[0, 20:], max_new_tokens=16, past_key_values=cache)
    assert found.sequences.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="more tokens than the"):
        ours(model, prompt[:5], [], max_new_tokens=4, past_key_values=cache)


def test_without_a_cache_and_with_padding() -> None:
    model, prompt = trained("llama"), text(random.Random(13), 14)
    expected = reference(model, prompt, max_new_tokens=16)
    assert ours(model, prompt, expected[0, 14:], max_new_tokens=16, use_cache=False).sequences.equal(expected)
    ids = torch.tensor([[0, 0, 0, *prompt]])
    mask = torch.tensor([[0, 0, 0, *[1] * 14]])
    padded = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    found = hf.generate(
        model, ids, attention_mask=mask, prediction=expected[0, 14:], max_new_tokens=16, do_sample=False
    )
    assert found.equal(padded)
    assert found[0, 3:].equal(expected[0])


def test_a_cache_that_cannot_forget_drafts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(transformers.cache_utils.DynamicLayer):
        pass

    model, prompt = trained("llama"), text(random.Random(14), 8)
    expected = reference(model, prompt, max_new_tokens=10)

    def cache() -> Any:
        made = transformers.DynamicCache(config=model.config)
        made.layers = [Odd() for _ in range(2)]
        return made

    found = ours(model, prompt, expected[0, 8:], max_new_tokens=10, past_key_values=cache(), strict=False)
    assert found.sequences.equal(expected)
    assert found.predicted_outputs.steps == 10
    assert "Odd of the cache cannot forget" in found.predicted_outputs.failure
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="Odd of the cache"):
        ours(model, prompt, [], max_new_tokens=10, past_key_values=cache())


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
    for input_ids in (prompt, torch.tensor(prompt), torch.tensor([prompt]), asked):
        for prediction in (
            output,
            output[None],
            output.tolist(),
            tuple(output.tolist()),
            output.numpy(),
            written,
        ):
            found = hf.generate(model, input_ids, prediction=prediction, tokenizer=tokenizer, **options)
            assert found.equal(expected)
    stop = tokenizer.decode(output[5:7])
    stopped = hf.generate(
        model, asked, prediction=written, tokenizer=tokenizer, stop_strings=[stop], **options
    )
    assert stopped.shape[1] < expected.shape[1]
    ids = torch.tensor([prompt])
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, stop_strings=[stop], max_new_tokens=20,
        do_sample=False,
    )  # fmt: skip
    assert stopped.equal(plain)


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
    "bytes": ({"prediction": b"w1"}, TypeError, "found bytes"),
    "matrix": ({"prediction": torch.ones(2, 2)}, ValueError, "one sequence"),
    "outside": ({"prediction": [1, VOCAB], "strict": True}, ValueError, rf"prediction\[1\].*{VOCAB}"),
    "no drafts": ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected at least 1"),
    "no predictor": ({"predictor": 3}, TypeError, "expected a TokenPredictor, found int"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused(what: str) -> None:
    given, kind, message = BAD[what]
    arguments = {"input_ids": [1, 2, 3], "max_new_tokens": 4, **given}
    with pytest.raises(kind, match=message):
        hf.generate(trained("llama"), **arguments)


class Breaks(TokenPredictor):
    """Drafts well until it has seen some tokens, then calls a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def predict_tokens(self) -> list[int]:
        written = len(self.state_tokens) - 8
        if written < 12:
            return list(self.options.prediction[written : written + 3])
        tokens: list[int] = self.function()
        return tokens


def _raise() -> list[int]:
    raise KeyError("x")


FAILURES: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "raises": (_raise, KeyError),
    "outside": (lambda: [1, VOCAB], ValueError),
    "negative": (lambda: [-1], ValueError),
    "no ids": (lambda: ["a"], TypeError),
    "hangs": (threading.Event().wait, TimeoutError),
}


@pytest.mark.parametrize("what", [*FAILURES, "disposed"])
def test_a_predictor_that_fails_costs_its_drafts_alone(what: str, caplog: pytest.LogCaptureFixture) -> None:
    function, error = FAILURES.get(
        what, (lambda: predictor.dispose() or predictor._check_disposed(), DisposedError)
    )
    model, prompt = trained("llama"), text(random.Random(19), 8)
    expected = reference(model, prompt, max_new_tokens=24)
    predictor = Breaks(function)
    options = {"max_new_tokens": 24, "predictor": predictor, "predictor_timeout": 0.2}
    found = ours(model, prompt, expected[0, 8:], strict=False, **options)
    assert found.sequences.equal(expected)
    counts = found.predicted_outputs
    assert (counts.steps, counts.accepted, counts.rejected) == (3 + 12, 9, 0)
    assert error.__name__ in counts.failure
    assert len(caplog.records) == 1
    options["predictor"] = predictor = Breaks(function)
    with pytest.raises(error):
        ours(model, prompt, expected[0, 8:], **options)


def test_other_models_are_refused() -> None:
    small = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": VOCAB}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, d_kv=8))
    with pytest.raises(ValueError, match="found T5ForConditionalGeneration, an encoder-decoder"):
        hf.generate(model, [1, 2])
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB, state_size=4)
    with pytest.raises(ValueError, match="MambaForCausalLM, whose state cannot go back"):
        hf.generate(transformers.MambaForCausalLM(config), [1, 2])


def test_a_prediction_outside_of_the_vocabulary_costs_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = trained("llama"), text(random.Random(16), 8)
    expected = reference(model, prompt, max_new_tokens=10)
    found = ours(model, prompt, [VOCAB + 3], max_new_tokens=10, strict=False)
    assert found.sequences.equal(expected)
    assert found.predicted_outputs.steps == 10
    assert len(caplog.records) == 1


def test_other_architectures() -> None:
    """Learned positions, and a model that takes no position ids."""
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    gpt2 = transformers.GPT2Config(**sizes, n_positions=128, n_embd=32, n_layer=1, n_head=2)
    bloom = transformers.BloomConfig(**sizes, hidden_size=32, n_layer=1, n_head=2)
    for config in (gpt2, bloom):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.pad_token_id = 0
        prompt = text(random.Random(17), 9)
        expected = reference(model, prompt, max_new_tokens=24)
        for prediction in predictions(expected[0, 9:].tolist(), random.Random(18)).values():
            assert ours(model, prompt, prediction, max_new_tokens=24).sequences.equal(expected)


def test_untrained_models_differ() -> None:
    """The fixtures are not one model twice."""
    one, other = untrained("llama", 1), untrained("llama", 2)
    assert not one.lm_head.weight.equal(other.lm_head.weight)
