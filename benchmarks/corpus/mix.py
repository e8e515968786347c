"""What the corpus has beside the files of real releases: edits of known kinds, and other tokenizers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.corpus.edits import EDITS
from benchmarks.corpus.files import Edit, hash_of
from benchmarks.corpus.states import state_pair
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


#: Records a kind of edit and split.
NUM_MADE = {"tune": 36, "test": 15}
NUM_STATES = {"tune": 24, "test": 12}
#: One in so many real files is tokenized again by each other tokenizer.
ONE_IN = 8
#: Longest text that is edited here, and that is written in bytes; Tekken tokens.
MAX_EDITED, MAX_RETOKENIZED = 4_000, 1_800
#: How many of a kind's edits are on which sort of text, in turn.
_TURNS = ("python", "document", "python", "json", "config", "python", "sql", "document")


def synthetic_pairs(texts: Sequence[Edit], split: str) -> list[Edit]:
    """Edits of every kind on texts of this split; donors are of the same sort and split."""
    made: list[Edit] = []
    fitting = [text for text in texts if text.num_tokens <= MAX_EDITED]
    for kind, edit in [*EDITS.items(), ("unrelated", None)]:
        turns = {
            sort: sorted((t for t in fitting if t.text == sort), key=lambda t: hash_of(kind, t.id))
            for sort in dict.fromkeys(_TURNS)
        }
        donors = {sort: found[::-1] for sort, found in turns.items()}
        count, sorts = 0, cycle(_TURNS)
        while count < NUM_MADE[split] and any(turns.values()):
            sort = next(sorts)
            if not turns[sort]:
                continue
            text = turns[sort].pop()
            rng = random.Random(hash_of(kind, text.id))
            donor = _donor(text, donors[sort], rng)
            if donor is None:
                continue
            before, after = donor.after, text.after
            if edit is not None:
                before, after = text.after, edit(text.after, donor.after, rng)
            if after is not None:
                made.append(Edit(f"{kind}/{text.id}", kind, sort, text.package, before, after))
                count += 1
    for number in range(NUM_STATES[split]):
        form = ("json", "yaml", "json_compact")[number % 3]
        pair = state_pair(form, random.Random(hash_of("state", split, str(number))))
        sort = "config" if form == "yaml" else "json"
        made.append(Edit(f"state/{split}/{number:02}.{form}", "state", sort, "", *pair))
    return made


def other_tokens(
    texts: Sequence[Edit], split: str, training: Sequence[str], cache: Path
) -> Iterator[tuple[str, Callable[[str], list[int]], list[Edit]]]:
    """``(name, encode, edits)`` of each further tokenizer: a BPE trained on `training`, and bytes."""
    for name in ("bpe", "bytes"):
        tokenizer = trained_bpe(training, cache) if name == "bpe" else ByteTokenizer()
        short = (t for t in texts if t.num_tokens <= MAX_RETOKENIZED)
        yield name, tokenizer.encode, [t for t in short if hash_of(name, t.id) % ONE_IN == 0]


def _donor(text: Edit, donors: Sequence[Edit], rng: random.Random) -> Edit | None:
    """Another package's text where there is one, else another text."""
    elsewhere = [d for d in donors if d.package != text.package] or [d for d in donors if d.id != text.id]
    return rng.choice(elsewhere) if elsewhere else None
