"""`realign`: plain Python, the reference and the kernel agree, from rows that the LCS operation carried."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_align.ops.lcs import lcs_extend_inplace, lcs_row_words
from gpu_align.ops.realign import Alignment, realign

BACKENDS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def oracle(output, prediction):
    """Smallest j with the largest 4 H[j] - j, and the largest 2 H[j] - j; H by the textbook table."""
    row = [0] * (len(prediction) + 1)
    for token in output:
        new = [0]
        for j, other in enumerate(prediction):
            new.append(row[j] + 1 if token == other else max(row[j + 1], new[j]))
        row = new
    return best_of(row)


def best_of(common):
    scores = [4 * h - j for j, h in enumerate(common)]
    return scores.index(max(scores)), max(2 * h - j for j, h in enumerate(common))


def pack(rises, num_words, width):
    """[num_words] int32 of a row whose H rises at the given positions; bits beyond the text are poison."""
    bits = [0 if i in rises else 1 for i in range(width)] + [0] * (num_words * 32 - width)
    words = [sum(bits[32 * w + k] << k for k in range(32)) for w in range(num_words)]
    return [w - 2**32 if w >= 2**31 else w for w in words]


def run(backend, rows, lengths, slots, active):
    device = DEVICE if backend == "triton" else "cpu"
    out = Alignment(*(torch.full((len(slots),), -77, dtype=torch.int32, device=device) for _ in range(2)))
    realign(
        torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), -1),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        active=torch.tensor(active, dtype=torch.int32, device=device),
        out=out,
        backend=backend,
    )
    return list(zip(out.cursor.tolist(), out.followed.tolist(), strict=True))


@st.composite
def row_batches(draw):
    size = draw(st.integers(1, 4))
    lengths = [
        draw(st.one_of(st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65]), st.integers(0, 96)))
        for _ in range(size)
    ]
    rises = [set(draw(st.lists(st.integers(0, n - 1), max_size=20))) if n else set() for n in lengths]
    order = draw(st.permutations(range(size)))
    return rises, lengths, order, [draw(st.sampled_from([0, 1, 1, 3])) for _ in order]


@settings(max_examples=2000, deadline=None, database=None)
@given(row_batches())
def test_three_oracles_agree(batch):
    rises, lengths, order, active = batch
    num_words = 4
    rows = [pack(r, num_words, n) for r, n in zip(rises, lengths, strict=True)]
    expected = []
    for slot, is_active in zip(order, active, strict=True):
        common = [0]
        for i in range(lengths[slot]):
            common.append(common[-1] + (i in rises[slot]))
        expected.append(best_of(common) if is_active else (0, 0))
    for backend in BACKENDS:
        assert run(backend, rows, lengths, order, active) == expected, backend


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=70))
def test_the_cursor_of_a_carried_row(output, prediction):
    n = max(len(prediction), 1)
    for backend in BACKENDS:
        device = DEVICE if backend == "triton" else "cpu"

        def tensor(values, dtype=torch.int32, device=device):
            return torch.tensor(values, dtype=dtype, device=device)

        row = torch.full((1, lcs_row_words(n)), -1, dtype=torch.int32, device=device)
        padded = tensor([prediction + [0] * (n - len(prediction))])
        slots = tensor([0], torch.int64)
        lcs_extend_inplace(
            row, tensor([-1]), tensor([[*output, 0]]), tensor([0]), tensor([len(output)]),
            padded, tensor([len(prediction)]), slots, tensor([1]), backend=backend,
        )  # fmt: skip
        found = realign(row, tensor([len(prediction)]), slots, backend=backend)
        assert (found.cursor.item(), found.followed.item()) == oracle(output, prediction)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1000, 1024, 1025, 3000])
def test_rows_beyond_one_block(backend, size):
    num_words = (size + 31) // 32
    for rises, want in [
        (set(range(size)), (size, size)),
        (set(), (0, 0)),
        ({0, size - 1}, (1, 1)),
        (set(range(5, 900)), (900, 890)),
    ]:
        assert run(backend, [pack(rises, num_words, size)], [size], [0], [1]) == [want]


def test_docstring_example():
    assert oracle([5, 6, 1], [5, 6, 7, 8, 9]) == (2, 2)
    assert oracle([5, 6, 1, 9], [5, 6, 7, 8, 9]) == (5, 2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"row": torch.zeros((1, 2))}, TypeError, ["row", "int32", "float32"]),
        ({"row": torch.zeros((4, 1), dtype=torch.int32).T[:, ::2]}, ValueError, ["row", "stride"]),
        ({"prediction_len": torch.zeros(2, dtype=torch.int32)}, ValueError, ["prediction_len", "[1]", "[2]"]),
        ({"slots": torch.zeros(1)}, TypeError, ["slots", "int64", "float32"]),
        (
            {"out": Alignment(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))},
            ValueError,
            ["out.cursor", "[1]", "[3]"],
        ),
    ],
)
def test_bad_input_is_named(change, error, words):
    good = {
        "row": torch.zeros((1, 2), dtype=torch.int32),
        "prediction_len": torch.zeros(1, dtype=torch.int32),
        "slots": torch.zeros(1, dtype=torch.int64),
    }
    for backend in BACKENDS:
        with pytest.raises(error) as caught:
            realign(**{**good, "backend": backend, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
