"""What a drafter may know beside its request: the shipped recipes, and the outputs of the tuning split.

A recipe pack is what is left of texts once nothing is kept but what usually follows what; a server with a cache of
earlier responses would hold them whole. The recipes are learned from all files of the tuning splits' packages, of
which the outputs are a part.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from benchmarks.corpus.build import DEFAULT_CACHE
from benchmarks.corpus.tokens import ByteTokenizer, trained_bpe
from benchmarks.quality.runs import Entry, Knowledge, read_entries
from gpu_align import RecipePack
from gpu_align.simulate import load_tokenizer


class Encodes(Protocol):
    """A tokenizer of the corpus."""

    def encode(self, text: str) -> list[int]: ...


def knowledge(tune: Path, tokens: Sequence[str], jobs: int = 1) -> dict[str, Knowledge]:
    """By the name of the tokens in the corpus, what there is to know in them.

    Args:
        tune: the tuning split.
        tokens: of "tekken", "bpe" and "bytes" those that are asked for.
        jobs: processes.
    """
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tokens)) or 1) as pool:
        found = pool.starmap(_knowledge, [(tune, name) for name in tokens], chunksize=1)
    return dict(zip(tokens, found, strict=True))


def tokenizer_of(tokens: str, texts: Sequence[str], cache: Path = DEFAULT_CACHE) -> Encodes:
    """The tokenizer behind the corpus's name for its tokens; `texts` are those that its own BPE is trained on."""
    if tokens == "bytes":
        return ByteTokenizer()
    return trained_bpe(texts, cache) if tokens == "bpe" else load_tokenizer(tokens)


def texts_of(entries: Sequence[Entry]) -> list[str]:
    """What the real files of these entries were changed to, as text, in their order."""
    tokenizer = load_tokenizer("tekken")
    outputs = (e.record.output for e in entries if e.tokens == "tekken" and e.kind == e.text)
    return [b"".join(map(tokenizer.token_bytes, output)).decode() for output in outputs]


def _knowledge(tune: Path, tokens: str) -> Knowledge:
    # The BPE is trained on just these texts, so that its cached file is found by their hash.
    texts = texts_of(_entries(tune))
    encode = tokenizer_of(tokens, texts).encode
    recipes = RecipePack.load().tokenize(lambda words: [encode(word) for word in words])
    return Knowledge(recipes, [encode(text) for text in texts])


@lru_cache(maxsize=1)
def _entries(tune: Path) -> list[Entry]:
    return read_entries(tune)
