"""60 odd texts as predictions, by four tokenizers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_llama import build
from odd_texts import TEXTS

from vllm_integration.config.settings import Settings
from vllm_integration.frontend.prediction import Limits, parse_prediction, tokenize_params

pytestmark = pytest.mark.vllm

LIMITS = Limits(1_000, Settings(max_prediction_chars=10_000))


def _byte_level(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(build(directory))


def _unigram(directory: Path) -> Any:
    """As SentencePiece trains them: marks for spaces, bytes for what it never saw."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=800, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>", eos_token="</s>")


def _of_mistral(pattern: str, name: str) -> Callable[[Path], Any]:
    """A tokenizer that mistral-common brings, as vLLM uses it."""

    def make(directory: Path) -> Any:
        import mistral_common
        from vllm.tokenizers.mistral import MistralTokenizer

        found = sorted((Path(mistral_common.__file__).parent / "data").glob(pattern))
        shutil.copy(found[-1], directory / name)
        return MistralTokenizer.from_pretrained(directory)

    return make


TOKENIZERS = {
    "byte-level": _byte_level,
    "unigram": _unigram,
    "tekken": _of_mistral("tekken_*.json", "tekken.json"),
    "sentencepiece": _of_mistral("mistral_instruct_tokenizer_*.model.v3", "tokenizer.model.v3"),
}
LOSSLESS = {"byte-level", "tekken"}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = TOKENIZERS[request.param](tmp_path_factory.mktemp("tokenizer"))
    made.is_lossless = request.param in LOSSLESS
    return made


def encode(tokenizer: Any, text: str) -> list[int]:
    """As vLLM's renderer encodes with the parameters that we give it."""
    kwargs = tokenize_params(LIMITS).get_encode_kwargs()
    return list(tokenizer(text, **kwargs)["input_ids"])


def as_a_model_writes(text: str) -> str:
    return "\n".join(text.replace("\r\n", "\n").split("\r"))


def test_one_token_more_than_the_limit_is_made() -> None:
    """So that it is known whether something was cut."""
    assert tokenize_params(LIMITS).truncate_prompt_tokens == 1_001


def test_a_text_is_the_prediction_of_itself(tokenizer: Any) -> None:
    """The model writes each text with LF; the prediction is the text as a client has it. Its tokens are those that
    the model writes, so all drafts are right."""
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    assert len(set(TEXTS)) == len(TEXTS) == 60
    for text in TEXTS:
        written = as_a_model_writes(text)
        prediction = encode(tokenizer, parse_prediction({"type": "content", "content": text}, LIMITS))
        assert prediction == encode(tokenizer, written), repr(text)
        assert all(0 <= token < vocabulary for token in prediction)
        if tokenizer.is_lossless:
            decoded = tokenizer.decode(prediction, skip_special_tokens=False)
            assert decoded.encode() == written.encode(), repr(text)
