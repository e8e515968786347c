"""`suffix_match`: plain Python, the reference and the kernel agree on every batch."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_align.ops.suffix_match import SuffixMatch, allocate_suffix_match, suffix_match

BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -(2**31) + 17


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


def run(backend, requests, slots, active, anchors, min_match, max_match, width=1):
    """Pack requests (context prefix, context, text) into poisoned slots and call the operation."""
    num_slots = max(slots, default=0) + 2
    widest_context = max((len(p) + len(c) for p, c, _ in requests), default=0)
    widest_text = max((len(t) for *_, t in requests), default=0)
    # Rows are slices of something wider, and what lies beside them is never to be read.
    context = torch.full((num_slots, widest_context + width), POISON, dtype=torch.int32)
    text = torch.full((num_slots, widest_text + width), POISON, dtype=torch.int32)
    start, context_len, text_len = (torch.zeros(num_slots, dtype=torch.int32) for _ in range(3))
    for slot, (prefix, suffix, t) in zip(slots, requests, strict=True):
        context[slot, : len(prefix) + len(suffix)] = torch.tensor(prefix + suffix, dtype=torch.int32)
        text[slot, : len(t)] = torch.tensor(t, dtype=torch.int32)
        start[slot], context_len[slot], text_len[slot] = len(prefix), len(prefix) + len(suffix), len(t)
    device = DEVICE if backend == "triton" else "cpu"
    out = SuffixMatch(
        *(torch.full((len(slots),), POISON, dtype=torch.int32, device=device) for _ in range(2))
    )
    result = suffix_match(
        context[:, : widest_context + 1].to(device),
        start.to(device),
        context_len.to(device),
        text[:, : widest_text + 1].to(device),
        text_len.to(device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        active=torch.tensor(active, dtype=torch.int32, device=device),
        anchor=None if anchors is None else torch.tensor(anchors, dtype=torch.int32, device=device),
        min_match=min_match,
        max_match=max_match,
        out=out,
        backend=backend,
    )
    assert result is out
    return list(zip(result.end.tolist(), result.length.tolist(), strict=True))


EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 65]


@st.composite
def batches(draw):
    size = draw(st.integers(0, 4))
    requests = []
    for _ in range(size):
        alphabet = draw(st.sampled_from([1, 2, 3, 9]))
        token = st.integers(0, alphabet - 1)

        def tokens(token=token):
            length = draw(st.one_of(st.sampled_from(EDGES), st.integers(0, 12)))
            if draw(st.booleans()):
                period = draw(st.lists(token, min_size=1, max_size=4))
                return (period * (length // len(period) + 1))[:length]
            return draw(st.lists(token, min_size=min(length, 12), max_size=min(length, 12)))

        prefix = draw(st.lists(token, max_size=3))
        context, text = tokens(), tokens()
        if draw(st.booleans()):  # something to find
            text = text + context + draw(st.lists(token, max_size=3))
        requests.append((prefix, context, text))
    slots = draw(st.permutations(range(size + 2)))[:size]
    anchors = draw(st.one_of(st.none(), st.lists(st.integers(-3, 140), min_size=size, max_size=size)))
    max_match = draw(st.sampled_from([1, 3, 32, 64]))
    return {
        "requests": requests,
        "slots": slots,
        "active": draw(st.lists(st.sampled_from([0, 1, 1, 5]), min_size=size, max_size=size)),
        "anchors": anchors,
        "max_match": max_match,
        "min_match": draw(st.integers(1, min(max_match, 3))),
    }


@settings(max_examples=2000, deadline=None, database=None)
@given(batches())
@example(
    {
        "requests": [([9], [], [1])], "slots": [0], "active": [1], "anchors": None,
        "max_match": 64, "min_match": 1,
    }
)  # fmt: skip
def test_three_oracles_agree(batch):
    expected = []
    for i, (_, context, text) in enumerate(batch["requests"]):
        anchor = None if batch["anchors"] is None else batch["anchors"][i]
        settings_ = (anchor, batch["min_match"], batch["max_match"])
        expected.append(oracle(context, text, *settings_) if batch["active"][i] else (-1, 0))
    for backend in BACKENDS:
        assert run(backend, **batch) == expected, backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1000, 1024, 1025, 2049])
def test_texts_beyond_one_block(backend, size):
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(0, 3, (size,), generator=generator).tolist()
    context = text[size // 2 : size // 2 + 40]
    for anchors in (None, [0], [size]):
        expected = oracle(context, text, anchors and anchors[0], 1, 64)
        found = run(backend, [([], context, text)], [1], [1], anchors, 1, 64)
        assert found == [expected]
        assert expected[1] >= 40


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_nearest_and_ahead_before_behind(backend):
    text = [1, 9, 1, 9, 1, 9, 1, 9]  # a 1 ends at 1, 3, 5, 7
    for anchor, want in [(None, 7), (0, 1), (4, 5), (3, 3), (2, 3), (6, 7), (100, 7)]:
        anchors = None if anchor is None else [anchor]
        found = run(backend, [([], [1], text)], [0], [1], anchors, 1, 64)
        assert found == [(want, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_context_is_no_match_of_itself(backend):
    device = DEVICE if backend == "triton" else "cpu"
    context = torch.tensor([[4, 5, 6, 4, 5]], dtype=torch.int32, device=device)
    zero, five = (torch.tensor([v], dtype=torch.int32, device=device) for v in (0, 5))
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    found = suffix_match(context, zero, five, context, five, slots, backend=backend)
    assert (found.end.item(), found.length.item()) == (2, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_order_and_slots_do_not_matter(backend):
    requests = [([], [1, 2], [1, 2, 1, 2, 3]), ([7], [3], [3, 3]), ([], [5], [6]), ([], [], [1])]
    straight = run(backend, requests, [0, 1, 2, 3], [1] * 4, None, 1, 64)
    turned = run(backend, requests[::-1], [5, 0, 2, 1], [1] * 4, None, 1, 64)
    assert straight == turned[::-1]


def good_arguments():
    return {
        "context": torch.zeros((2, 5), dtype=torch.int32),
        "context_start": torch.zeros(2, dtype=torch.int32),
        "context_len": torch.zeros(2, dtype=torch.int32),
        "text": torch.zeros((2, 7), dtype=torch.int32),
        "text_len": torch.zeros(2, dtype=torch.int32),
        "slots": torch.zeros(1, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"context": [[1]]}, TypeError, ["context", "list"]),
        ({"context": torch.zeros((2, 5))}, TypeError, ["context", "int32", "float32"]),
        ({"context": torch.zeros((5, 2), dtype=torch.int32).T}, ValueError, ["context", "stride"]),
        ({"context_len": torch.zeros(3, dtype=torch.int32)}, ValueError, ["context_len", "[2]", "[3]"]),
        ({"text": torch.zeros(7, dtype=torch.int32)}, ValueError, ["text", "2 dimensions", "1"]),
        ({"text_len": torch.zeros(2, dtype=torch.int64)}, TypeError, ["text_len", "int32", "int64"]),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, TypeError, ["slots", "int64", "int32"]),
        ({"active": torch.zeros(2, dtype=torch.int32)}, ValueError, ["active", "[1]", "[2]"]),
        ({"anchor": torch.zeros(1, device="meta", dtype=torch.int32)}, ValueError, ["anchor", "cpu", "meta"]),
        ({"min_match": 0}, ValueError, ["min_match=0"]),
        ({"min_match": 5, "max_match": 4}, ValueError, ["min_match=5", "max_match=4"]),
        ({"backend": "cuda"}, ValueError, ["backend", "cuda"]),
        ({"out": allocate_suffix_match(2, "cpu")}, ValueError, ["out.end", "[1]", "[2]"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    for backend in [change["backend"]] if "backend" in change else BACKENDS:
        with pytest.raises(error) as caught:
            suffix_match(**{**good_arguments(), "backend": backend, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
