"""`suffix_match`: plain Python, the reference and the kernel agree on every batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gpu_align.ops.suffix_match import SuffixMatch, allocate_suffix_match, suffix_match
from tests.gpu_align.step_harness import BACKENDS, device_of

POISON = -(2**31) + 17
#: Prefix of the context, context, text.
Request = tuple[list[int], list[int], list[int]]


def oracle(context, text, anchor, min_match, max_match):
    """The loop of the docstring, with ties spelled out."""
    found = []
    for end in range(1, len(text)):
        length = 0
        while length < min(max_match, end, len(context)) and text[end - 1 - length] == context[-1 - length]:
            length += 1
        if length == 0:
            continue
        nearest = end if anchor is None else -2 * abs(end - anchor) + (1 if end >= anchor else 0)
        found.append((length, nearest, end))
    length, _, end = max(found, default=(0, 0, -1))
    return (end, length) if length >= min_match else (-1, 0)


def run(backend, requests, slots=None, active=None, anchors=None, **how):
    """Pack requests into poisoned slots and call the operation."""
    slots = list(range(len(requests))) if slots is None else slots
    active = [1] * len(requests) if active is None else active
    num_slots, device = max(slots, default=0) + 2, device_of(backend)
    # Rows are slices of something wider, and what lies beside them is never to be read.
    widths = [
        max((len(p) + len(c) for p, c, _ in requests), default=0),
        max((len(t) for *_, t in requests), default=0),
    ]
    context, text = (torch.full((num_slots, width + 2), POISON, dtype=torch.int32) for width in widths)
    start, context_len, text_len = (torch.zeros(num_slots, dtype=torch.int32) for _ in range(3))
    for slot, (prefix, suffix, t) in zip(slots, requests, strict=True):
        context[slot, : len(prefix) + len(suffix)] = torch.tensor(prefix + suffix, dtype=torch.int32)
        text[slot, : len(t)] = torch.tensor(t, dtype=torch.int32)
        start[slot], context_len[slot], text_len[slot] = len(prefix), len(prefix) + len(suffix), len(t)
    out = SuffixMatch(
        *(torch.full((len(slots),), POISON, dtype=torch.int32, device=device) for _ in range(2))
    )
    rows = (context[:, : widths[0] + 1], start, context_len, text[:, : widths[1] + 1], text_len)
    result = suffix_match(
        *(tensor.to(device) for tensor in rows),
        torch.tensor(slots, dtype=torch.int64, device=device),
        active=torch.tensor(active, dtype=torch.int32, device=device),
        anchor=None if anchors is None else torch.tensor(anchors, dtype=torch.int32, device=device),
        out=out, backend=backend, **how,
    )  # fmt: skip
    assert result is out
    return list(zip(result.end.tolist(), result.length.tolist(), strict=True))


def random_rows(seed: int, B: int) -> list[dict[str, Any]]:
    """What each request of a ragged batch gets; a quarter of them have nothing to look up."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for _ in range(B):
        alphabet, edges = rng.choice([1, 2, 3, 9]), rng.choice([(0, 1, 2, 31, 32, 33, 63, 64, 65), range(13)])
        prefix, context, text = (
            [rng.randrange(alphabet) for _ in range(rng.choice(sizes))] for sizes in (range(4), edges, edges)
        )
        if rng.random() < 0.3:  # periodic, so that long matches tie
            context, text = ((part[:3] * 30)[: len(part)] for part in (context, text))
        if rng.random() < 0.5:  # something to find
            text += context[rng.choice([0, rng.randrange(len(context) + 1)]) :] + text[:3]
        requests.append((prefix, context, text))
    slots = rng.sample(range(B + 2), B)
    active = [rng.choice([0, 1, 1, 5]) for _ in range(B)]
    anchors = [rng.randint(-3, 140) for _ in range(B)] if rng.random() < 0.7 else None
    max_match = rng.choice([1, 3, 32, 64])
    how = {"min_match": rng.randint(1, min(max_match, 3)), "max_match": max_match}
    found = [run(backend, requests, slots, active, anchors, **how) for backend in BACKENDS]
    rows = []
    for b, (_, context, text) in enumerate(requests):
        anchor = None if anchors is None else anchors[b]
        expected = oracle(context, text, anchor, **how) if active[b] else (-1, 0)
        rows.append({
            "holds": all(results[b] == expected for results in found), "request": requests[b],
            "active": active[b], "anchor": anchor, **how, "oracle": expected,
            **{backend: results[b] for backend, results in zip(BACKENDS, found, strict=True)},
        })  # fmt: skip
    return rows


def test_random_batches() -> None:
    """The campaign's `exactness` has many more of them."""
    for seed in range(40):
        for row in random_rows(seed, (0, 1, 4, 40)[seed % 4]):
            assert row["holds"], (seed, row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1000, 1024, 1025, 2049])
def test_texts_beyond_one_block(backend, size):
    text = random.Random(size).choices(range(3), k=size)
    context = text[size // 2 : size // 2 + 80]
    for anchors in (None, [0], [size]):
        expected = oracle(context, text, anchors and anchors[0], 1, 64)
        assert run(backend, [([], context, text)], anchors=anchors) == [expected]
        assert expected[1] == 64  # the most by default


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_context_is_no_match_of_itself(backend):
    context = torch.tensor([[4, 5, 6, 4, 5]], dtype=torch.int32, device=device_of(backend))
    zero, five = (torch.tensor([v], dtype=torch.int32, device=context.device) for v in (0, 5))
    slots = torch.zeros(1, dtype=torch.int64, device=context.device)
    found = suffix_match(context, zero, five, context, five, slots, backend=backend)
    assert (found.end.item(), found.length.item()) == (2, 2)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"context": [[1]]}, TypeError, ["context", "list"]),
        ({"context": torch.zeros((2, 5))}, TypeError, ["context", "int32", "float32"]),
        ({"context": int32(5, 2).T}, ValueError, ["context", "stride"]),
        ({"context_len": int32(3)}, ValueError, ["context_len", "[2]", "[3]"]),
        ({"text": int32(7)}, ValueError, ["text", "2 dimensions", "1"]),
        ({"text_len": int32(2).long()}, TypeError, ["text_len", "int32", "int64"]),
        ({"slots": int32(1)}, TypeError, ["slots", "int64", "int32"]),
        ({"active": int32(2)}, ValueError, ["active", "[1]", "[2]"]),
        ({"anchor": torch.zeros(1, device="meta", dtype=torch.int32)}, ValueError, ["anchor", "cpu", "meta"]),
        ({"min_match": 0}, ValueError, ["min_match=0"]),
        ({"min_match": 5, "max_match": 4}, ValueError, ["min_match=5", "max_match=4"]),
        ({"backend": "cuda"}, ValueError, ["backend", "cuda"]),
        ({"out": allocate_suffix_match(2, "cpu")}, ValueError, ["out.end", "[1]", "[2]"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    good = {
        "context": int32(2, 5), "context_start": int32(2), "context_len": int32(2), "text": int32(2, 7),
        "text_len": int32(2), "slots": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    for backend in [change["backend"]] if "backend" in change else BACKENDS:
        with pytest.raises(error) as caught:
            suffix_match(**{**good, "backend": backend, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
