"""LCS operations: plain Python, the NumPy reference and the Triton kernels agree on every integer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from gpu_align.ops import lcs
from gpu_align.ops.layout import HASH
from gpu_align.ops.lcs.reference import Batch
from tests.gpu_align.engine import BACKENDS, device_of

POISON = -0x5A5A5A5B


def table(a: Sequence[int], b: Sequence[int]) -> list[list[int]]:
    h = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            h[i + 1][j + 1] = h[i][j] + 1 if x == y else max(h[i][j + 1], h[i + 1][j])
    return h


def make_batch(seed: int, requests: int, m: int, n: int, alphabet: int) -> Batch:
    """Ragged random batch; a third of the predictions are edited contexts, so that long matches occur."""
    rng = np.random.default_rng(seed)
    context = rng.integers(0, alphabet, (requests, m)).astype(np.int32)
    prediction = rng.integers(0, alphabet, (requests, n)).astype(np.int32)
    if m and n:
        for b in range(0, requests, 3):
            prediction[b] = np.resize(np.delete(context[b], rng.integers(0, m)) if m > 1 else context[b], n)
    if alphabet == 5:  # the ends of the domain are tokens as any other
        for x in (context, prediction):
            x[x == 0], x[x == 1], x[x == 2] = -(2**31), 2**31 - 1, -1
    lens = [np.minimum(rng.integers(0, k + 1 + k // 3, requests), k).astype(np.int32) for k in (m, n)]
    return tuple(torch.from_numpy(x) for x in (context, lens[0], prediction, lens[1]))


def cut(batch: Batch) -> list[tuple[list[int], list[int]]]:
    context, context_len, prediction, prediction_len = (x.tolist() for x in batch)
    return [
        (c[:m], p[:n]) for c, m, p, n in zip(context, context_len, prediction, prediction_len, strict=True)
    ]


def put(batch: Sequence[torch.Tensor], backend: str) -> list[torch.Tensor]:
    return [x.to(device_of(backend)) for x in batch]


def poisoned(backend: str, *shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=device_of(backend))


@contextmanager
def panels_of(block_words: int | None) -> Iterator[None]:
    """Panels of so many words of 32 tokens, so that a small prediction goes through in several."""
    with pytest.MonkeyPatch.context() as patch:
        if block_words is not None:
            patch.setattr(lcs, "_MIN_BLOCK_WORDS", block_words)
            patch.setattr(lcs, "_MAX_BLOCK_WORDS", block_words)
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is garbage."""
    empty = torch.empty

    def garbage(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        values = {torch.int8: 0x5A, torch.int32: POISON, torch.int64: POISON}
        return found.fill_(values[found.dtype]) if found.dtype in values else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", garbage)
        yield


def run_all(batch: Batch, backend: str, block_words: int | None = None) -> list[tuple[Any, ...]]:
    """Of each request its length, the length of the two swapped and the prefix row; outputs and scratch start as
    garbage."""
    x = put(batch, backend)
    B, N = batch[0].shape[0], batch[2].shape[1]
    with poisoned_memory(), panels_of(block_words):
        length = lcs.lcs_length(*x, out=poisoned(backend, B), backend=backend)
        swapped = lcs.lcs_length(*x[2:], *x[:2], backend=backend)
        row = lcs.lcs_prefix_row(*x, out=poisoned(backend, B, N + 1), backend=backend)
    return list(zip(length.tolist(), swapped.tolist(), row.tolist(), strict=True))


def expected_of(batch: Batch) -> list[tuple[Any, ...]]:
    """The same by the table of the textbook."""
    width, found = batch[2].shape[1], []
    for context, prediction in cut(batch):
        rows = table(context, prediction)
        length = rows[-1][-1]
        row = rows[-1] + [length] * (width - len(prediction))
        found.append((length, length, row))
    return found


def check_all(batch: Batch, backend: str, block_words: int | None = None) -> None:
    assert run_all(batch, backend, block_words) == expected_of(batch)


def random_rows(seed: int, B: int) -> list[dict[str, Any]]:
    """What each request of a ragged batch gets."""
    rng = random.Random(seed)
    shape = rng.choice([*range(13), 33, 65]), rng.choice([0, 1, 5, 9, 31, 32, 33, 40, 63, 64, 65])
    batch = make_batch(seed, B, *shape, rng.choice([1, 2, 3, 5, 30]))
    block_words = rng.choice([None, 2, 4])
    found = {backend: run_all(batch, backend, block_words) for backend in BACKENDS}
    return [
        {
            "holds": all(rows[b] == expected for rows in found.values()), "context": context,
            "prediction": prediction, "block_words": block_words, "oracle": expected,
            **{backend: rows[b] for backend, rows in found.items()},
        }
        for b, ((context, prediction), expected) in enumerate(zip(cut(batch), expected_of(batch), strict=True))
    ]  # fmt: skip


def test_random_batches(pytestconfig: pytest.Config) -> None:
    for seed in range(30 * pytestconfig.getoption("--campaign-count")):
        for row in random_rows(seed, (1, 64, 0)[seed % 3]):
            assert row["holds"], (seed, row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("m", "n", "block_words", "block_tokens"),
    [(5, 70, 2, 4096), (3, 70, 4, 64), (12, 200, 2, 32), (140, 40, None, 4096)],
)
def test_one_request_a_program(
    backend: str, m: int, n: int, block_words: int | None, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; the other tests put a whole batch in one program under the interpreter. Panels and carries."""
    monkeypatch.setattr(lcs, "_INTERPRETER_REQUESTS", 1)
    monkeypatch.setattr(lcs, "_MAX_BLOCK_TOKENS", block_tokens)
    batch = make_batch(7, 3, m, n, 3)
    batch[1][0], batch[3][0] = m, n
    check_all(batch, backend, block_words)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_outside_the_rows_are_clamped(backend: str) -> None:
    context, _, prediction, _ = make_batch(3, 2, 6, 7, 2)
    lengths = [torch.tensor(v, dtype=torch.int32) for v in ([99, -4], [1000, 3], [6, 0], [7, 3])]
    wild, tame = ((context, lengths[i], prediction, lengths[i + 1]) for i in (0, 2))
    assert run_all(wild, backend) == expected_of(tame)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_nothing_written_beside_them(backend: str) -> None:
    batch = make_batch(11, 5, 9, 37, 3)
    x = put(batch, backend)
    wide_c, wide_p = poisoned(backend, 10, 20), poisoned(backend, 10, 50)
    wide_c[::2, 3:12], wide_p[::2, 5:42] = x[0], x[2]
    x[0], x[2] = wide_c[::2, 3:12], wide_p[::2, 5:42]
    rows = poisoned(backend, 10, 60)
    lcs.lcs_prefix_row(*x, out=rows[::2, 4:42], backend=backend)
    *_, expected_rows = zip(*expected_of(batch), strict=True)
    assert rows[::2, 4:42].tolist() == list(expected_rows)
    rows[::2, 4:42] = POISON
    assert (rows == POISON).all()


def colliding(bits: int, count: int, slot: int) -> list[int]:
    """Tokens whose look-ups begin in the same of ``1 << bits`` slots, negative ones among them."""
    found = [t for t in range(-40_000, 40_000) if (t * HASH & 0xFFFFFFFF) >> (32 - bits) == slot]
    assert len(found) >= count
    return found[:: len(found) // count][:count]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("slot", "block_tokens"), [(0, 64), (511, 4096)])
def test_tokens_that_look_for_the_same_slot(
    backend: str, slot: int, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred different tokens in one cluster of the table, which goes past its end and on at its beginning."""
    monkeypatch.setattr(lcs, "_MAX_BLOCK_TOKENS", block_tokens)
    tokens = np.array(colliding(9, 100, slot), np.int32)
    rng = np.random.default_rng(slot)
    context, prediction = rng.choice(tokens[:90], (3, 20)), rng.permuted(np.tile(tokens[10:], (3, 2)), axis=1)
    lens = [np.array([20, 17, 0], np.int32), np.array([180, 170, 180], np.int32)]
    batch = tuple(torch.from_numpy(a) for a in (context, lens[0], prediction, lens[1]))
    check_all(batch, backend)


OPERATIONS = lcs.lcs_length, lcs.lcs_prefix_row
#: Operations, what becomes of their arguments, and what is said.
BAD: list[tuple[Any, dict[str, Callable[..., Any]], type[Exception], str]] = [
    *(
        (OPERATIONS, {name: spoil}, error, rf"^{name}(\.shape\[1\])?: {said}")
        for name, spoil, error, said in (
            ("context", lambda x: [[1]], TypeError, "expected a torch.Tensor, found list"),
            ("context", lambda x: x.long(), TypeError, "expected dtype torch.int32, found torch.int64"),
            ("context", lambda x: x[0], ValueError, r"expected 2 dimensions, found 1 \(shape \(4,\)\)"),
            ("context", lambda x: x.t().contiguous().t(), ValueError, "expected stride 1 .* found strides"),
            ("context", lambda x: x.new_empty(1, 2**30 + 1).expand(3, -1), ValueError, "expected 0 to 1073741824"),
            ("context_len", lambda x: x[:2], ValueError, r"expected shape \[3\], found \[2\]"),
            ("prediction", lambda x: x[:2], ValueError, r"expected shape \[3, any\], found \[2, 5\]"),
            ("prediction_len", lambda x: x.float(), TypeError, "expected dtype torch.int32, found torch.float32"),
            ("prediction_len", lambda x: x.to("meta"), ValueError, "expected device .*, found meta"),
        )
    ),
    ([lcs.lcs_length], {"out": lambda x: poisoned(x, 4)}, ValueError, r"out: expected shape \[3\], found \[4\]"),
    ([lcs.lcs_prefix_row], {"out": lambda x: poisoned(x, 3, 5)}, ValueError,
     r"out: expected shape \[3, 6\], found \[3, 5\]"),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("operations", "spoiled", "error", "message"), BAD)
def test_bad_input(
    backend: str, operations: Any, spoiled: dict[str, Any], error: type[Exception], message: str
) -> None:
    names = "context", "context_len", "prediction", "prediction_len"
    given: dict[str, Any] = dict(zip(names, put(make_batch(0, 3, 4, 5, 2), backend), strict=True))
    for name, spoil in spoiled.items():
        given[name] = spoil(given.get(name, backend))
    for op in operations:
        with pytest.raises(error, match=message):
            op(**given, backend=backend)


def test_bad_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_batch(0, 3, 4, 5, 2)
    with pytest.raises(ValueError, match=r"backend: expected one of .*'auto'.*, found 'cuda'"):
        lcs.lcs_length(*x, backend="cuda")
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="backend: 'triton' expects CUDA tensors"):
        lcs.lcs_length(*x, backend="triton")
    assert lcs.lcs_length(*x).tolist() == [table(a, b)[-1][-1] for a, b in cut(x)]
