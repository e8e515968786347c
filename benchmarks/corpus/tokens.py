"""Tokenizers beside Tekken: bytes, and a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_align.errors import MissingExtraError

VOCAB_SIZE = 8_192


class ByteTokenizer:
    """One token a byte of UTF-8."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class BpeTokenizer:
    """A byte-level BPE of `tokenizers`."""

    name = "bpe"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id])
        return text.encode()


def trained_bpe(texts: Sequence[str], cache: Path, vocab_size: int = VOCAB_SIZE) -> BpeTokenizer:
    """The BPE of these texts; kept in `cache` under their hash, so that it is trained once.

    Training counts pairs and breaks ties by token id: the same texts give the same merges.

    Raises:
        MissingExtraError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("the corpus's own tokenizer", "tokenizers", "bench") from error
    digest = hashlib.sha256(repr((vocab_size, sorted(texts))).encode()).hexdigest()[:16]
    path = cache / f"bpe-{digest}.json"
    if not path.is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(sorted(texts), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return BpeTokenizer(Tokenizer.from_file(str(path)))
