"""`Drafter`: requests share the room for predictions, and what they share never shows."""

import pytest

from gpu_align import Source
from gpu_align.ops.constants import PAGE
from tests.gpu_align.engine import Engine, distinct
from tests.gpu_align.step_harness import BACKENDS, standing_of


@pytest.mark.parametrize("backend", BACKENDS)
class TestPredictions:
    """Requests share the room for predictions; none of that shows in what is drafted."""

    def test_a_refused_prediction_leaves_the_request_its_context(self, backend):
        engine = Engine(backend, max_slots=3, max_prediction_tokens=PAGE)
        block = distinct(20, 40)
        assert engine.add(0, distinct(100), [], [0, 1, 2])
        assert not engine.add(1, distinct(100, 5), [], [*block, 7, *block[:4]])
        assert engine.drafter.prediction_stats.refused == 1
        first, second = engine.propose([0, 1])
        assert first[0][: first[1]] == distinct(16, 3)
        assert second[3] == Source.CONTEXT
        assert second[0][: second[1]] == block[4 : 4 + second[1]]
        assert second[1] >= 4
        # The same as for a request without a prediction.
        assert engine.add(2, [], [], [*block, 7, *block[:4]])
        assert engine.propose([2])[0] == second
        # When the first is gone there is room.
        engine.drafter.remove(0)
        assert engine.add(1, distinct(100, 5), [], distinct(3, 5))
        assert engine.propose([1])[0][0] == distinct(16, 8)

    def test_a_refused_prediction_leaves_nothing_of_the_slot_s_old_one(self, backend):
        engine = Engine(backend, max_slots=2, N=600, max_prediction_tokens=2 * PAGE)
        assert engine.add(0, distinct(PAGE), [])
        assert engine.add(1, distinct(100, 300), [], [300, 301])
        assert engine.propose([1])[0][0] == distinct(16, 302)
        assert not engine.add(1, distinct(600), [], [300, 301])
        assert engine.propose([1])[0][1] == 0

    def test_two_requests_share_one_prediction(self, backend):
        engine, prediction = Engine(backend), distinct(90)
        outputs = {0: distinct(10), 2: [*distinct(30), 500, *distinct(5, 31)], 3: distinct(4, 60)}
        for slot, output in outputs.items():
            assert engine.add(slot, prediction, [900] * slot, output)
        stats = engine.drafter.prediction_stats
        assert (stats.num_predictions, stats.reused, stats.used_tokens) == (1, 2, PAGE)
        together = dict(zip(outputs, engine.propose(list(outputs)), strict=True))
        for slot, output in outputs.items():
            alone = Engine(backend)
            alone.add(slot, prediction, [900] * slot, output)
            assert alone.propose([slot])[0] == together[slot]
        # It stays for the others when one of them ends, and when one is given another prediction.
        engine.drafter.remove(0)
        engine.add(2, distinct(50, 200), [], [200])
        assert engine.propose([3])[0] == together[3]
        assert engine.propose([2])[0][0] == distinct(16, 201)

    def test_a_prediction_comes_back(self, backend):
        """After a preemption, in another slot, and with more tokens than its prompt."""
        prediction, output = distinct(90), [*distinct(30), 500, *distinct(5, 31)]
        engine = Engine(backend)
        engine.add(1, prediction, [900], output)
        before = engine.propose([1])
        engine.drafter.remove(1)
        assert engine.drafter.prediction_stats.cached_tokens == PAGE
        assert engine.propose([1])[0][1] == 0
        assert engine.add(3, prediction, [900], output)
        assert engine.drafter.prediction_stats.reused == 1
        assert engine.propose([3]) == before

    def test_a_prediction_whose_room_was_taken_comes_back(self, backend):
        engine = Engine(backend, max_slots=2, max_prediction_tokens=PAGE)
        for _ in range(3):
            for start in (0, 300):
                assert engine.add(0, distinct(100, start), [], distinct(5, start))
                assert engine.propose([0])[0][0] == distinct(16, start + 5)
        assert engine.drafter.prediction_stats.evicted == 5

    def test_remove_then_add(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(60), [7, 8], [0, 1, 2, 500, 2, 3])
        engine.propose([0])
        engine.drafter.remove(0)
        engine.drafter.remove(0)  # a free slot stays free
        engine.add(0, distinct(60, 200), [7], [200, 201])
        fresh = Engine(backend)
        fresh.add(0, distinct(60, 200), [7], [200, 201])
        assert engine.propose([0]) == fresh.propose([0])
        assert standing_of(engine.drafter, 0) == standing_of(fresh.drafter, 0)

    def test_an_upload_that_fails_leaves_the_slot_vacant(self, backend, monkeypatch):
        engine = Engine(backend)
        engine.add(0, distinct(60), [], [0, 1])
        engine.add(1, distinct(60, 100), [], [100, 101])

        def fail(*_):
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("gpu_align.ops.state.build_index", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.add(0, distinct(60, 200), [])
        assert [length for _, length, *_ in engine.propose([0, 1])] == [0, 16]
        # What was uploaded in part is not taken for a prediction that is there.
        assert engine.add(0, distinct(60, 200), [], [200])
        assert engine.propose([0])[0][0] == distinct(16, 201)
