"""The survival tables of `draft`: read, fitted to K, cut by the thresholds; and its length factor."""

import json

import numpy as np
import pytest
import torch

from gpu_align import DrafterConfig, Recipes, TextKind
from gpu_align.drafter.admission import rules_of
from gpu_align.drafter.survival import KNOTS, SHIPPED, fit_curves, make_tables, read_survival
from gpu_align.ops.choose import (
    ADHERENCE_LOST,
    ALIGNMENT_CONTEXT,
    NUM_ADHERENCES,
    NUM_ALIGNMENTS,
    NUM_CLASSES,
    NUM_LENGTHS,
    NUM_MARGINS,
    SURVIVAL_ONE,
    unpack_class,
)  # fmt: skip
from gpu_align.ops.files import content_hash
from gpu_align.ops.layout import FIRST_GAP, RULES_OF
from gpu_align.texts.several import joined
from tests.gpu_align.engine import BACKENDS, Engine

_, _, ALIGNMENT, ADHERENCE = unpack_class(np.arange(NUM_CLASSES))
#: Candidates in a prediction that the output hardly adheres to.
LOST = (ALIGNMENT != ALIGNMENT_CONTEXT) & (ADHERENCE == ADHERENCE_LOST)
CONFIG = DrafterConfig(min_survival=0.05, min_survival_lost=0.6)


def test_thresholds():
    curves = np.array([[1000, 500, 500, 3]] * NUM_CLASSES, dtype=np.int32)
    for floor, floor_lost, keep, keep_lost in ((500, 501, 3, 1), (501, 0, 1, 1), (0, 2000, 4, 0)):
        tables = make_tables(curves, "cpu", floor / SURVIVAL_ONE, floor_lost / SURVIVAL_ONE)
        lost = torch.from_numpy(LOST)
        limits = tables.max_draft_len[:NUM_CLASSES]
        assert (limits[lost] == keep_lost).all()
        assert (limits[~lost] == keep).all()
        expected = [0, 1000, 1500, 2000, 2003]
        for class_id in (0, int(lost.nonzero()[0])):
            limit = int(limits[class_id])
            row = [*expected[: limit + 1], *[expected[limit]] * (4 - limit)]
            assert tables.expected_accepted[class_id].tolist() == row
    assert LOST.sum() == NUM_CLASSES // 3 * 4 // 5


@pytest.mark.parametrize(
    ("kind", "drafts", "sure"),
    [
        # Drafts of a prediction that the output hardly adheres to; of the context beside it, and beside one that
        # the output follows. Whether those of such predictions count as accepted.
        (TextKind.PREDICTION, (1, 4, 4), (False, False)),
        (TextKind.MEMORY, (1, 4, 4), (False, False)),
        (TextKind.RELATED_MEMORY, (3, 4, 4), (False, False)),
        (TextKind.SKELETON, (3, 4, 1), (False, True)),
    ],
)
def test_limits_of_a_text(kind, drafts, sure):
    curves = np.array([[0.7, 0.29, 0.15, 0.06]] * NUM_CLASSES) * SURVIVAL_ONE
    tables = make_tables(curves.astype(np.int32), "cpu", 0.05, 0.6)
    row = RULES_OF[kind].limits * NUM_CLASSES
    beside = 3 * ALIGNMENT_CONTEXT
    classes = int(np.flatnonzero(LOST)[0]), beside + ADHERENCE_LOST, beside + ADHERENCE_LOST + 1
    assert tuple(int(tables.max_draft_len[row + class_id]) for class_id in classes) == drafts
    first = tables.expected_accepted[[row + ADHERENCE_LOST, row + ADHERENCE_LOST + 1], 1]
    assert tuple((first == SURVIVAL_ONE).tolist()) == sure
    assert ((first == int(curves[0, 0])) | (first == SURVIVAL_ONE)).all()


@pytest.mark.parametrize(
    ("kind", "texts", "temperature", "limits"),
    [
        *(
            (TextKind.PREDICTION, ([1, 2], [3]), *each)
            for each in ((0, 0), (0.29, 0), (0.3, 3), (0.85, 5), (9, 5))
        ),
        (TextKind.PREDICTION, ([1, 2],), 0.7, 0),
        (TextKind.PREDICTION, (), 0.7, 0),
        (TextKind.MEMORY, ([1, 2], [3]), 0.7, 0),
        (TextKind.RELATED_MEMORY, ([1, 2], [3]), 0.7, 1),
    ],
)
def test_several_predictions_are_samples_from_a_temperature_on(kind, texts, temperature, limits):
    text = np.array(joined(texts), np.int32)
    assert rules_of(kind, text, temperature) == RULES_OF[kind]._replace(
        limits=limits, prior=1 if limits > 2 else RULES_OF[kind].prior
    )


def test_a_skeleton_after_a_prediction_is_no_other_sample():
    text = np.array([1, 2, FIRST_GAP, 3, FIRST_GAP + 1], np.int32)
    assert rules_of(TextKind.PREDICTION, text, 0.7) == RULES_OF[TextKind.PREDICTION]


def test_samples_that_agree_are_drafted_further():
    """More of a sample is drafted the longer it matches, the fewer dissent, the more agree, the cooler it is."""
    tables = CONFIG.tables_for(32, "cpu")
    shape = (6, NUM_LENGTHS, NUM_MARGINS, NUM_ALIGNMENTS, NUM_ADHERENCES, 33)
    first = tables.expected_accepted.reshape(shape)[3:, ..., 1]
    lengths = first[:, 1:, :, :ALIGNMENT_CONTEXT]
    assert (lengths.diff(dim=1) >= 0).all()
    assert (first.diff(dim=2) <= 0).all()
    assert (first.diff(dim=4) >= 0).all()
    assert (first.diff(dim=0) <= 0).all()
    assert all((first.diff(dim=dim) != 0).any() for dim in (0, 1, 2, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_a_skeleton_that_is_followed_a_recipe_has_to_be_likely(backend):
    skeleton, related = TextKind.SKELETON, TextKind.RELATED_MEMORY
    for probability, kind, num in ((0.4, skeleton, 0), (0.9, skeleton, 1), (0.4, related, 1)):
        recipes = Recipes.from_lists([((50,), (60,), (probability,))])
        engine = Engine(backend, T=16, N=16, K=4, recipes=recipes)
        engine.add(0, [*range(1, 9), FIRST_GAP], (), [*range(1, 9), 50], kind=kind)
        [(_, length, _, source)] = engine.propose([0])
        assert (length, source) == (num, 3 * num)


@pytest.mark.parametrize("K", [1, 65])
def test_the_shipped_table_fits_any_number_of_drafts(K):
    tables = CONFIG.tables_for(K, "cpu")
    assert tables.expected_accepted.shape == (6 * NUM_CLASSES, K + 1)
    assert tables.confidence.shape == (5 * NUM_CLASSES, K)
    assert (tables.max_draft_len >= 0).all()
    assert (tables.max_draft_len <= K).all()
    assert (tables.expected_accepted[:, 1:] >= tables.expected_accepted[:, :-1]).all()
    assert (tables.confidence > 0).all()
    assert (tables.confidence <= 1).all()


def test_curves_go_through_the_knots_and_on_at_their_last_rate():
    curve = np.array([[SURVIVAL_ONE * 0.9**k for k in KNOTS], [8.0] * 6 + [0.0] * 6, [100.0] * 12])
    fitted = fit_curves(curve, 80)
    assert fitted[0].tolist() == [round(SURVIVAL_ONE * 0.9**k) or 1 for k in range(1, 81)]
    # Zeros end at the smallest survival there is, one unit.
    assert fitted[1, :8].tolist() == [8] * 8
    assert fitted[1, 11:].tolist() == [1] * 69
    assert fitted[2].tolist() == [100] * 80
    assert (np.diff(fitted, axis=1) <= 0).all()


ROWS = [*[5] * 11, 6], [SURVIVAL_ONE + 1] * 12, [*[5] * 11, -1], [5] * 11, [float("nan")] * 12


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"knots": [1, 2]}, "knots: "), ({"knots": None}, "knots: "), ({"survival": [[5] * 12]}, "survival: "),
        ({"survival": None}, "survival: "),
        *(({"survival": [row] * NUM_CLASSES}, "survival[0]: ") for row in ROWS),
        ({"calibration": [0.1]}, "calibration: "), ({"calibration": [2.0] * 20}, "calibration[0]: "),
        ({"format": "another"}, "format: "), ({"format": None}, "format: "), ({"settings": []}, "settings: "),
        ({"length_edges": [1]}, "length_edges: "), ({"sha256": "0"}, "sha256: "),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path, change, place):
    good = json.loads(SHIPPED.read_text()) | {"survival": [[5] * 12] * NUM_CLASSES}
    good["sha256"] = content_hash(good, "sha256")
    path = tmp_path / "table.json"
    path.write_text(json.dumps(good))
    assert read_survival(path)[0].shape == (NUM_CLASSES, 12)
    bad = tmp_path / "bad_table.json"
    bad.write_text(json.dumps({name: v for name, v in (good | change).items() if v is not None}))
    with pytest.raises(ValueError, match=r"bad_table\.json") as caught:
        read_survival(bad)
    assert place in str(caught.value)


def test_confidence_is_calibrated_and_the_choice_is_not():
    """The offset of a bin holds at its middle, is interpolated between, and never leaves (0, 1]."""
    half = np.full((NUM_CLASSES, 2), SURVIVAL_ONE // 2, dtype=np.int32)
    offsets = [0.0] * 20
    offsets[9], offsets[10] = -0.1, -0.3  # around 0.475 and 0.525
    offsets[19] = 0.5
    plain, shifted = (make_tables(half, "cpu", 0.05, 0.6, c) for c in ([0.0] * 20, offsets))
    assert plain.confidence[0].tolist() == [0.5, 1.0]
    # At a high temperature a logit is 0.6 of it, less 0.5; that of 1 counts as that of 0.9999.
    assert plain.confidence[NUM_CLASSES].tolist() == pytest.approx([0.3775, 0.9935], abs=1e-4)
    assert shifted.confidence[0].tolist() == pytest.approx([0.3, 1.0])
    offsets[9] = offsets[10] = -0.9
    assert make_tables(half, "cpu", 0.05, 0.6, offsets).confidence[0, 0] == pytest.approx(1e-4)
    for name in ("max_draft_len", "expected_accepted"):
        assert getattr(plain, name).equal(getattr(shifted, name))
