"""Several predictions of a request: each is drafted from as if it came alone, and none runs into the next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_align import Drafter
from gpu_align.texts.several import MAX_TEXTS, held_once, joined, parted
from gpu_align.tools.simulate.records import read_records

GAP = 2**31 - 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[1, 2]], [1, 2]),
        ([[1, 2], [3]], [1, 2, GAP, 3]),
        ([[1], [], [2], [1], (3, 4)], [1, GAP, 2, GAP - 1, 3, 4]),
        ([np.array([1, 2]), [1, 2]], [1, 2]),
    ],
)
def test_texts_are_joined(texts: list[list[int]], expected: list[int]) -> None:
    assert joined(texts) == expected


@pytest.mark.parametrize(
    ("texts", "once"),
    [
        ([[]], [[]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ([[1], [2], [1], [3], [2]], [[1], [2], [3]]),
        ([[7]] * MAX_TEXTS, [[7]]),
        ([[n] for n in range(MAX_TEXTS)], [[n] for n in range(MAX_TEXTS)]),
    ],
)
def test_texts_are_parted_and_held_once(texts: list[list[int]], once: list[list[int]]) -> None:
    """The gaps of a skeleton after them are no ends of texts."""
    skeleton = np.array([2**31 - 2**16, 4, 2**31 - 2**16 + 1], np.int32)
    ids = np.array(joined(texts, once=False), np.int32)
    assert [part.tolist() for part in parted(ids)] == texts
    assert held_once(ids).tolist() == joined(once)
    more = np.concatenate([ids, skeleton])
    assert parted(more)[-1].tolist() == [*texts[-1], *skeleton.tolist()]
    assert held_once(more).tolist()[-3:] == skeleton.tolist()


def test_bad_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 texts, found 257"):
        joined([[n] for n in range(MAX_TEXTS + 1)])
    with pytest.raises(ValueError, match="token ids below"):
        joined([[1], [GAP]])


def test_records_may_bring_several(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"id": "a", "predictions": [[1, 2], [3]], "output": [3]}))
    (record,) = read_records(path)
    assert record.prediction == [1, 2, GAP, 3]


def drafts_of(prediction: list[int], output: list[int]) -> list[list[int]]:
    """The draft after each token of an output."""
    token_ids, total_len = torch.zeros(1, 256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    drafter = Drafter(
        token_ids=token_ids, total_len=total_len, max_prediction_len=512, num_draft_tokens=8, vocab_size=1_000
    )
    drafter.add(0, prediction, 0)
    token_ids[0, : len(output)] = torch.tensor(output)
    found = []
    for n in range(1, len(output) + 1):
        total_len[0] = n
        draft = drafter.propose(torch.tensor([0]), torch.ones(1, dtype=torch.int32))
        found.append(draft.token_ids[0, : draft.length[0]].tolist())
    return found


@pytest.mark.parametrize("which", range(3))
def test_each_is_drafted_from_to_its_end(which: int) -> None:
    """Once its first tokens have shown which it is; until then drafts are shorter."""
    rng = np.random.default_rng(0)
    texts = [rng.permutation(range(start, start + 90)).tolist() for start in (0, 300, 600)]
    answer = texts[which][:60]
    found = drafts_of(joined(texts), answer)
    expected = [texts[which][n : n + 8] for n in range(1, 61)]
    assert found[12:] == expected[12:]
    assert all(long[: len(short)] == short for short, long in zip(found[2:], expected[2:], strict=True))
    to_the_end = drafts_of(joined(texts), texts[which])
    assert [draft for draft in to_the_end[-8:] if not set(draft) <= set(texts[which])] == []
    assert to_the_end[-1] == []
