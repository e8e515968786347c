"""A model that drafts for another: it validates itself, a random one refutes, and the output is the target's."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gpu_align import hf
from gpu_align.predictors import DisposedError, DraftModelTokenPredictor, PredictorOptions, VocabularyError
from tests.gpu_align.tiny_models import VOCAB, encoder_decoder, reference, text, trained, untrained

NEW = 32


def generate(predictor: Any, prompt: list[int], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    found = hf.generate(trained("llama"), prompt, predictor=predictor, **options)
    assert found.sequences.equal(reference(trained("llama"), prompt, **options).sequences)
    return found.predicted_outputs


def test_the_target_itself_validates_everything() -> None:
    rng = random.Random(1)
    with DraftModelTokenPredictor(trained("llama"), 7, min_confidence=0) as predictor:
        for _ in range(2):
            counts = generate(predictor, text(rng, 12))
            assert counts.rejected == 0
            assert counts.accepted == NEW - counts.steps
            assert counts.steps == NEW // 8


def test_it_stops_where_its_confidence_falls() -> None:
    """The draft is the longest prefix of its greedy continuation whose tokens are all likely enough."""
    model, rng = trained("llama"), random.Random(4)
    for least in (0.0, 0.3, 0.6, 1.0):
        predictor = DraftModelTokenPredictor(model, max_tokens=6, min_confidence=least)
        tokens = text(rng, 10)
        predictor.reset(tokens, PredictorOptions(vocab_size=VOCAB))
        for _ in range(6):  # right, wrong, several at a time
            expected: list[int] = []
            with torch.no_grad():
                while len(expected) < 6:
                    logits = model(torch.tensor([[*tokens, *expected]])).logits[0, -1]
                    confidence, token = logits.softmax(-1).max(-1)
                    if confidence < least:
                        break
                    expected.append(int(token))
            found = predictor.predict_tokens()
            # What is left of an earlier draft may be shorter, never different.
            assert found == expected[: len(found)]
            new = [*found[: rng.randrange(len(found) + 1)], rng.randrange(1, VOCAB)]
            tokens = [*tokens, *new]
            predictor.push_tokens(new)
        assert predictor._cache is None or predictor._cache.get_seq_length() == len(predictor._cached)


def test_it_drafts_up_to_its_end_token_and_its_longest_context() -> None:
    model = untrained("llama", 6)
    predictor = DraftModelTokenPredictor(model, max_tokens=8, min_confidence=0)
    predictor.reset([1, 2], PredictorOptions())
    draft = predictor.predict_tokens()
    model.generation_config.eos_token_id = draft[0]
    predictor = DraftModelTokenPredictor(model, max_tokens=8, min_confidence=0)
    predictor.reset([1, 2], PredictorOptions())
    assert predictor.predict_tokens() == draft[:1]
    short = untrained("llama", 7, max_position_embeddings=8)
    for predictor in (
        DraftModelTokenPredictor(short, min_confidence=0),
        DraftModelTokenPredictor(untrained("llama", 7), min_confidence=0, max_context_len=8),
    ):
        predictor.reset([1] * 6, PredictorOptions())
        assert len(predictor.predict_tokens()) <= 2
        predictor.reset([1] * 9, PredictorOptions())
        assert predictor.predict_tokens() == []
    with pytest.raises(ValueError, match="max_context_len: expected 1 or more, found 0"):
        DraftModelTokenPredictor(short, max_context_len=0)


def words(text: str) -> Any:
    """A tokenizer with these words."""
    return SimpleNamespace(get_vocab=lambda: {word: i for i, word in enumerate(text)})


def test_another_vocabulary_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    other = untrained("llama", 7, vocab_size=VOCAB + 2)
    predictor = DraftModelTokenPredictor(other)
    with pytest.raises(VocabularyError, match=f"expected a vocabulary of {VOCAB} tokens.*found {VOCAB + 2}"):
        predictor.reset([1], PredictorOptions(vocab_size=VOCAB))
    predictor.reset([1], PredictorOptions())  # nothing is known of the target
    counts = generate(predictor, [1, 2, 3])
    assert counts.steps == NEW
    assert "VocabularyError" in counts.failure
    assert len(caplog.records) == 1
    with pytest.raises(VocabularyError):
        hf.generate(trained("llama"), [1, 2], predictor=predictor, strict=True, max_new_tokens=4)
    # With tokenizers the tokens count, not the sizes of the models.
    same = DraftModelTokenPredictor(other, tokenizer=words("ab"))
    same.reset([1], PredictorOptions(vocab_size=VOCAB, tokenizer=words("ab")))
    with pytest.raises(VocabularyError, match="other tokens"):
        same.reset([1], PredictorOptions(vocab_size=VOCAB, tokenizer=words("ba")))


def test_bad_models_and_settings(tmp_path: Path) -> None:
    for arguments in ({"min_confidence": 1.5}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match="expected"):
            DraftModelTokenPredictor(untrained("llama", 1), **arguments)
    made = DraftModelTokenPredictor(untrained("llama", 1))
    assert (made.max_tokens, made.min_confidence) == (16, 0.6)
    with pytest.raises(ValueError, match="found T5ForConditionalGeneration"):
        DraftModelTokenPredictor(encoder_decoder())
    untrained("llama", 8).save_pretrained(tmp_path)
    loaded = DraftModelTokenPredictor(str(tmp_path), max_tokens=2, min_confidence=0)
    loaded.reset([1, 2, 3], PredictorOptions(vocab_size=VOCAB))
    assert len(loaded.predict_tokens()) == 2
    loaded.dispose()
    with pytest.raises(DisposedError):
        loaded.predict_tokens()
