"""`ResponseMemory`: finished answers that later requests of the same tenant may draft from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.errors import check_int
from ..ops.layout import TextKind
from .checks import Integers, check_token_ids

TokenIds = npt.NDArray[np.int32]
Sketch = npt.NDArray[np.uint32]

#: Tokens of a prompt that count, its last ones; and those that say what is asked: the order of related answers.
PROMPT_TOKENS, TAIL_TOKENS = 2048, 32
#: Prompts of fewer tokens say nothing of an answer.
LEAST_PROMPT = 2
#: Bins of a sketch; `_EMPTY` is a bin without a pair of tokens, and no pair of the tail.
BINS, _EMPTY = 128, np.iinfo(np.uint32).max
#: Requests are alike where their sketches agree on this share of the bins.
ALIKE = 0.5
#: The latest answers of a tenant among which related ones are looked for.
MOST_COMPARED = 256
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_TOKEN_BYTES = 4


class Recalled(NamedTuple):
    """The choice of `ResponseMemory.recall_for`: answers in a row; whether to requests like this one."""

    token_ids: TokenIds
    kind: TextKind  # MEMORY or RELATED_MEMORY


class ResponseMemory:
    """The latest answers of each tenant, as tokens, at most `max_tokens` in all; the oldest goes first.

    ::

        memory = ResponseMemory(max_tokens=1 << 20)
        memory.remember(tenant, output, prompt)                  # when a request has finished
        found = memory.recall_for(tenant, prompt, drafter.max_prediction_len)
        drafter.add(slot, found.token_ids, len(prompt), kind=found.kind)

    What is recalled is a text to draft from, chosen once, when the request begins. No answer is ever recalled for
    another tenant. An answer that a tenant gave before is held once, as its newest. All methods take time in
    proportion to the tokens that they are given or give; `recall_for` also compares the prompt with those of the
    latest `MOST_COMPARED` answers, in constant time each, if none was to the same one. Not thread-safe.

    max_tokens: of all answers together, at least 1: 4 bytes each on the host. TypeError, ValueError otherwise.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = check_int("max_tokens", max_tokens, 1, 2**31 - 1)
        #: Every answer, the oldest first: its tenant, and its tokens as the bytes of int32.
        self._ages: OrderedDict[tuple[Hashable, bytes], None] = OrderedDict()
        #: The same by tenant, the oldest first, with the sketch and the key of each answer's prompt.
        self._answers: dict[Hashable, OrderedDict[bytes, tuple[Sketch, bytes]]] = {}
        #: The same by tenant and key of the prompt, the oldest first.
        self._same: dict[tuple[Hashable, bytes], OrderedDict[bytes, None]] = {}
        self.num_tokens = 0  # of all answers

    def __repr__(self) -> str:
        """One line: sizes, and nothing of any answer."""
        held = f"num_answers={len(self._ages)}, num_tenants={len(self._answers)}"
        return f"ResponseMemory(max_tokens={self.max_tokens}, num_tokens={self.num_tokens}, {held})"

    def remember(self, tenant: Hashable, token_ids: Integers, prompt: Integers = ()) -> bool:
        """Keep an answer; False if it is not kept, as it is empty or longer than `max_tokens`.

        Args:
            tenant: whose it is, hashable; None is a tenant like any other.
            token_ids: ``0 <= id < 2**31``, one dimension.
            prompt: what it is the answer to; of fewer than two tokens it is no relation of any request.

        After a TypeError or ValueError the memory is as it was.
        """
        hash(tenant)
        tokens = check_token_ids("token_ids", token_ids, 2**31).astype(np.int32)
        about = sketch_of(prompt), _key_of(prompt)
        if not 0 < len(tokens) <= self.max_tokens:
            return False
        key = tokens.tobytes()
        if (tenant, key) in self._ages:
            self._forget(tenant, key)
        while self.num_tokens + len(tokens) > self.max_tokens:
            self._forget(*next(iter(self._ages)))
        self._ages[tenant, key] = None
        self._answers.setdefault(tenant, OrderedDict())[key] = about
        self._same.setdefault((tenant, about[1]), OrderedDict())[key] = None
        self.num_tokens += len(tokens)
        return True

    def recall(self, tenant: Hashable, max_tokens: int) -> TokenIds:
        """A text of this tenant's answers, the newest first, each of them whole: [n] int32, ``n <= max_tokens``.
        An answer that does not fit any more is left out, and so are all before it."""
        return _text(reversed(self._answers.get(tenant, OrderedDict())), max_tokens)

    def recall_for(self, tenant: Hashable, prompt: Integers, max_tokens: int) -> Recalled:
        """The text for a request with this prompt: answers to the same prompt, if it has `LEAST_PROMPT` tokens and
        there are any, the newest first; else answers to prompts like it; else `recall`.

        ::

            pairs(tokens) = the different pairs of neighbours among them
            alike = those of the latest `MOST_COMPARED` answers whose prompts have ``J >= ALIKE``, where
                    J = |pairs(prompt) ∩ pairs(other)| / |pairs(prompt) ∪ pairs(other)|, estimated in `BINS` bins
            the order: pairs in common of the prompts' last `TAIL_TOKENS` tokens, most first; then the newest first
        """
        if len(prompt) >= LEAST_PROMPT and (same := self._same.get((tenant, _key_of(prompt)))):
            return Recalled(_text(reversed(same), max_tokens), TextKind.RELATED_MEMORY)
        sketch, answers = sketch_of(prompt), self._answers.get(tenant, OrderedDict())
        latest = {key: about[0] for key, about in islice(reversed(answers.items()), MOST_COMPARED)}
        if latest and (chosen := _related(sketch, latest)):
            return Recalled(_text(chosen, max_tokens), TextKind.RELATED_MEMORY)
        return Recalled(self.recall(tenant, max_tokens), TextKind.MEMORY)

    def _forget(self, tenant: Hashable, key: bytes) -> None:
        del self._ages[tenant, key]
        _, prompt = self._answers[tenant].pop(key)
        del self._same[tenant, prompt][key]
        if not self._same[tenant, prompt]:
            del self._same[tenant, prompt]
        self.num_tokens -= len(key) // _TOKEN_BYTES
        if not self._answers[tenant]:
            del self._answers[tenant]


def sketch_of(prompt: Integers) -> Sketch:
    """[BINS + TAIL_TOKENS - 1]: one-permutation min-hash of a prompt's pairs of neighbours; then its tail's.

    Each pair has a hash, whose upper bits are its bin; a bin holds the least of the lower 32 bits of its pairs.
    Two sets have the same value in a bin as often as they have elements in common. Without a pair all are empty.
    """
    tokens = check_token_ids("prompt", prompt[-PROMPT_TOKENS:], 2**31).astype(np.uint64)
    key = (tokens[:-1] * _FIRST ^ tokens[1:] * _SECOND) * _MIX
    key ^= key >> np.uint64(29)
    key *= _FIRST
    value = key.astype(np.uint32)
    sketch = np.full(BINS + TAIL_TOKENS - 1, _EMPTY, dtype=np.uint32)
    np.minimum.at(sketch, (key >> np.uint64(64 - 7)).astype(np.intp), value)
    tail = np.unique(value[-TAIL_TOKENS + 1 :])
    sketch[BINS : BINS + len(tail)] = tail
    return sketch


def _key_of(prompt: Integers) -> bytes:
    """Equal for prompts of one length whose tokens that count are the same."""
    counted = np.asarray([len(prompt), *prompt[-PROMPT_TOKENS:]], dtype=np.int64)
    return hashlib.blake2b(counted.tobytes(), digest_size=16).digest()


def _related(sketch: Sketch, answers: dict[bytes, Sketch]) -> list[bytes]:
    """Those of the answers to prompts that are like this one, the closest first. answers: the newest first."""
    others = np.stack([*answers.values()])
    # Of the bins that one of both has, the share where they have the same.
    mine, theirs = sketch[:BINS], others[:, :BINS]
    filled = (mine != _EMPTY) | (theirs != _EMPTY)
    shares = ((mine == theirs) & filled).sum(axis=1) / np.maximum(filled.sum(axis=1), 1)
    alike = np.flatnonzero(shares >= ALIKE)
    tail, tails = sketch[BINS:], others[alike, BINS:]
    common = np.isin(tails, tail[tail != _EMPTY]).sum(axis=1)
    tokens = list(answers)
    return [tokens[i] for i in alike[np.argsort(-common, kind="stable")]]


def _text(answers: Iterable[bytes], max_tokens: int) -> TokenIds:
    """The first of these answers, each whole, one after the other: as many as have at most `max_tokens`."""
    chosen = []
    for answer in answers:
        max_tokens -= len(answer) // _TOKEN_BYTES
        if max_tokens < 0:
            break
        chosen.append(answer)
    return np.frombuffer(b"".join(chosen), dtype=np.int32).copy()
