"""`Drafter`: the contract, on the references everywhere and on the kernels (interpreted or native)."""

import math
import random
from pathlib import Path

import pytest
import torch

import gpu_align
from gpu_align import DrafterConfig, Source
from tests.gpu_align.engine import Engine, distinct, same, snapshot
from tests.gpu_align.step_harness import BACKENDS, standing_of


@pytest.mark.parametrize("K", [16, 32, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_perfect_prediction_takes_the_fewest_steps(backend, K):
    generator = random.Random(K)
    for L, alphabet in [(1, 3), (2, 3), (K + 1, 50), (K + 2, 2), (3 * K + 5, 900), (200, 2)]:
        output = [generator.randrange(alphabet) for _ in range(L)]
        engine = Engine(backend, N=210, K=K)
        engine.add(0, output, [7] * 5)
        assert 1 + len(engine.generate(0, output)) == 1 + math.ceil((L - 1) / (K + 1)), (L, alphabet)


@pytest.mark.parametrize("backend", BACKENDS)
class TestRealignsAtOnce:
    """After each kind of edit the draft goes on in the right place as soon as two tokens match."""

    def resumes(self, backend, output, prediction, back_at):
        """Steps of the whole output, after checking that drafts are right as soon as there is evidence.

        `back_at`: position of the first output token after the edit that the prediction holds again.
        """
        engine = Engine(backend)
        engine.add(0, prediction, [900, 901])
        offered = engine.generate(0, output)
        after = [step for step in offered if step[0] > back_at]
        # At the latest when one token matches: a short draft, and right. Its successors grow with the evidence. A
        # guess that nothing matched may have been right a step before.
        assert after[0][0] <= back_at + 2
        assert all(0 < min(len(draft), len(output) - at) == accepted for at, draft, accepted, _ in after)
        assert [len(draft) for _, draft, _, _ in after][:2] == sorted(len(d) for _, d, _, _ in after[:2])
        return len(offered)

    def test_insertion(self, backend):
        output = [*distinct(30), 500, 501, *distinct(60, 30)]
        assert self.resumes(backend, output, distinct(90), back_at=32) <= 12

    def test_deletion(self, backend):
        output = distinct(30) + distinct(55, 33)
        assert self.resumes(backend, output, distinct(90), back_at=30) <= 10

    def test_substitution(self, backend):
        output = [*distinct(30), 500, *distinct(59, 31)]
        assert self.resumes(backend, output, distinct(90), back_at=31) <= 12

    def test_missing_block(self, backend):
        output = distinct(30) + distinct(30, 60)
        assert self.resumes(backend, output, distinct(90), back_at=30) <= 10

    def test_moved_block(self, backend):
        output = distinct(30) + distinct(30, 60) + distinct(30, 30)
        engine = Engine(backend)
        engine.add(0, distinct(90), [900, 901])
        offered = engine.generate(0, output)
        # Back to the middle block from the end of the last one: one wrong guess at each seam, no more.
        assert len(offered) <= 14
        assert sum(len(draft) - accepted for _, draft, accepted, _ in offered) <= 2 * engine.K

    def test_the_alignment_says_which_repeated_line_is_meant(self, backend):
        # Three blocks that end alike and go on differently; the output drops the first one.
        end = [8, 9, 8]
        blocks = [[*distinct(12, start), *end] for start in (100, 200, 300)]
        output = [*blocks[1][:12], *end, *blocks[2]]
        engine = Engine(backend)
        engine.add(0, [token for block in blocks for token in block], [])
        engine.write(0, output[:15])
        tokens, length, _, source = engine.propose([0])[0]
        assert (tokens[0], source) == (300, Source.PREDICTION)
        assert length >= 3 * 4 - 1

    def test_own_output(self, backend):
        engine = Engine(backend)
        engine.add(0, [], [])
        block = distinct(20, 40)
        engine.write(0, [*block, 7, 7, *block[:4]])
        tokens, length, _, source = engine.propose([0])[0]
        assert source == Source.CONTEXT
        assert tokens[:length] == block[4 : 4 + length]
        assert length >= 4

    def test_the_prompt(self, backend):
        engine = Engine(backend)
        engine.add(0, [], distinct(50, 100))
        engine.write(0, [110, 111, 112])
        tokens, length, _, source = engine.propose([0])[0]
        assert (tokens[:length], source) == (distinct(length, 113), Source.CONTEXT)
        assert length >= 3

    def test_cursor_at_zero_before_the_first_token(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(40), [5, 6])
        tokens, length, _, source = engine.propose([0])[0]
        assert (tokens[:length], source) == (distinct(16), Source.PREDICTION)


@pytest.mark.parametrize("backend", BACKENDS)
class TestContract:
    def test_prefill_changes_nothing(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(20), [1, 2])
        for _ in range(2):  # of a slot that was never seen, and of one that was
            before = snapshot(engine.drafter)
            tokens, length, confidence, source = engine.propose([0], [0])[0]
            assert (tokens, length, source) == ([2] * 16, 0, Source.NONE)
            assert confidence == [0.0] * 16
            assert same(before, engine.drafter)
            engine.propose([0])

    def test_confidence_and_padding(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(5), [])
        engine.write(0, [0])
        tokens, length, confidence, _ = engine.propose([0])[0]
        assert length == 4
        assert tokens == [1, 2, 3, 4] + [0] * 12
        assert all(0 < p <= 1 for p in confidence[:4])
        assert confidence[4:] == [0.0] * 12

    def test_the_split_over_steps_does_not_show(self, backend):
        # What preemption rests on: a fresh slot that sees all tokens at once drafts the same.
        generator = random.Random(1)
        prediction = [generator.randrange(6) for _ in range(100)]
        output = prediction[:30] + [generator.randrange(6) for _ in range(10)] + prediction[45:]
        engine = Engine(backend)
        engine.add(2, prediction, [9] * 7)
        done = 0
        while done < len(output):
            done_now = min(len(output), done + generator.choice([1, 1, 2, 17]))
            engine.write(2, output[done:done_now])
            done = done_now
            straight = engine.propose([2])
            engine.add(0, prediction, [9] * 7)
            engine.write(0, output[:done])
            assert engine.propose([0]) == straight
            if len(output) - done < 40 and backend == "triton":
                break

    def test_total_len_may_shrink(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(40), [])
        engine.write(0, [*distinct(10), 700, 701])
        engine.propose([0])
        engine.total_len[0] = 10
        tokens, length, *_ = engine.propose([0])[0]
        assert tokens[:length] == distinct(16, 10)

    def test_batch_order_and_slot_do_not_matter(self, backend):
        generator = random.Random(3)
        requests = []
        for _ in range(4):
            prediction = [generator.randrange(4) for _ in range(generator.randrange(0, 60))]
            output = prediction[: generator.randrange(0, 30)] + [generator.randrange(4) for _ in range(5)]
            requests.append((prediction, [generator.randrange(4) for _ in range(3)], output))

        def drafts(slots):
            engine = Engine(backend)
            for slot, (prediction, prompt, output) in zip(slots, requests, strict=True):
                engine.add(slot, prediction, prompt)
                engine.write(slot, output)
            return engine.propose(slots)

        assert drafts([0, 1, 2, 3]) == drafts([2, 0, 3, 1])

    def test_nothing_of_one_request_is_seen_by_another(self, backend):
        generator = random.Random(5)
        engine = Engine(backend, max_slots=3, T=64, N=32, K=8)
        held = {}
        for turn in range(400 if backend == "reference" else 40):
            slot = generator.randrange(3)
            if slot in held and generator.random() < 0.3:
                engine.drafter.remove(slot)
                del held[slot]
            else:
                canary = 20 + turn % 900
                engine.add(slot, [canary, 1, 2, canary] * generator.randrange(9), [1, 2])
                engine.write(slot, generator.choice([[], [1], [1, 2], [canary, 1]]))
                held[slot] = canary
            for s, (tokens, length, *_) in zip(range(3), engine.propose([0, 1, 2]), strict=True):
                if s not in held:
                    assert length == 0
                assert set(tokens[:length]) <= {1, 2, held.get(s)}

    def test_an_overwritten_slot_drafts_like_a_fresh_one(self, backend):
        # A small alphabet: which of many equal matches is taken hangs on the alignment, not on the old one.
        generator = random.Random(8)
        used = Engine(backend)
        for _ in range(30 if backend == "reference" else 8):
            prediction = [generator.randrange(3) for _ in range(40)]
            output = prediction[generator.randrange(20) :][:15] + [generator.randrange(3) for _ in range(3)]
            fresh = Engine(backend)
            for engine in (used, fresh):
                engine.add(0, prediction, [])
                engine.write(0, output)
            assert used.propose([0]) == fresh.propose([0])
            assert standing_of(used.drafter, 0) == standing_of(fresh.drafter, 0)
            assert torch.equal(used.drafter._state.context_index[0], fresh.drafter._state.context_index[0])

    def test_a_vacant_slot_gets_nothing(self, backend):
        engine = Engine(backend)
        engine.write(1, [4, 5, 4, 5, 4])
        assert engine.propose([1])[0][1] == 0
        engine.add(1, [4, 5], [])
        engine.drafter.remove(1)
        engine.write(1, [4, 5, 4, 5, 4])
        assert engine.propose([1])[0][1] == 0

    def test_empty_batch(self, backend):
        assert Engine(backend).propose([]) == []

    def test_never_past_the_end_of_the_row(self, backend):
        engine = Engine(backend, T=20)
        engine.add(0, distinct(40), [])
        engine.write(0, distinct(17))
        tokens, length, *_ = engine.propose([0])[0]
        assert tokens[:length] == [17, 18, 19]

    def test_the_caller_may_write_to_the_draft(self, backend):
        engine = Engine(backend)
        engine.add(0, distinct(40), [])
        engine.write(0, [0])
        first = engine.propose([0])
        args = (
            engine.token_ids,
            engine.total_len,
            torch.zeros(1, dtype=torch.int64, device=engine.device),
            torch.ones(1, dtype=torch.int32, device=engine.device),
        )
        for tensor in engine.drafter.propose(*args):
            tensor.fill_(-1)
        assert engine.propose([0]) == first

    def test_context_can_be_switched_off(self, backend):
        engine = Engine(backend, config=DrafterConfig(use_context=False))
        engine.add(0, [], [])
        engine.write(0, distinct(9) * 3)
        assert engine.propose([0])[0][1] == 0


def test_both_backends_draft_the_same_on_edits():
    generator = random.Random(11)
    for _ in range(6):
        prediction = [generator.randrange(12) for _ in range(generator.randrange(1, 100))]
        output = list(prediction)
        for _ in range(generator.randrange(6)):
            at = generator.randrange(len(output) + 1)
            output[at : at + generator.randrange(4)] = [
                generator.randrange(12) for _ in range(generator.randrange(4))
            ]
        output.append(3)
        runs = []
        for backend in BACKENDS:
            engine = Engine(backend)
            engine.add(1, prediction, [1, 2, 3])
            runs.append(engine.generate(1, output))
        assert runs[0] == runs[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnTheGPU:
    def engine(self):
        engine = Engine("triton", T=512, N=512)
        for slot in range(4):
            engine.add(slot, distinct(300, slot), [900 + slot])
            engine.write(slot, [*distinct(40, slot), 700, *distinct(3, slot + 50)])
        args = (
            engine.token_ids,
            engine.total_len,
            torch.arange(4, device="cuda"),
            torch.ones(4, dtype=torch.int32, device="cuda"),
        )
        engine.drafter.propose(*args)
        torch.cuda.synchronize()
        return engine, args

    def test_a_step_waits_for_nothing_and_allocates_nothing(self):
        engine, args = self.engine()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.drafter.propose(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated

    def test_add_and_remove_wait_for_nothing(self):
        """With few tokens, which PyTorch sorts by one kernel, with many, and with an index of 32 bits."""
        engine = Engine("triton", N=140_000, vocab=200_000)
        engine.drafter.warm_up(engine.token_ids, engine.total_len)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot, num_tokens in enumerate((60, 8000, 140_000)):
                assert engine.drafter.add(slot, distinct(num_tokens), 0)
            engine.drafter.remove(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_graph_replays_the_same_bits(self):
        engine, args = self.engine()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft = engine.drafter.propose(*args)
        for step in ([301], distinct(4, 60), [5, 6, 7]):
            for slot in range(4):
                engine.write(slot, step)
            eager = [t.clone() for t in engine.drafter.propose(*args)]
            for tensor in draft:
                tensor.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(eager, draft, strict=True))


def test_version_matches_the_package():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == gpu_align.__version__


@pytest.mark.parametrize("backend", BACKENDS)
def test_warming_up_changes_no_slot_and_holds_no_prediction(backend):
    cold, warm = (Engine(backend, N=600, max_prediction_tokens=256) for _ in range(2))
    slots, stats = snapshot(warm.drafter)[3:], warm.drafter.prediction_stats
    warm.drafter.warm_up(warm.token_ids, warm.total_len)
    assert all(torch.equal(*pair) for pair in zip(slots, snapshot(warm.drafter)[3:], strict=True))
    assert warm.drafter.prediction_stats == stats
    for engine in (cold, warm):
        engine.add(0, distinct(60), [900, 901], distinct(3))
    assert warm.propose([0]) == cold.propose([0])
    # With requests under way, too.
    before = snapshot(warm.drafter)
    warm.drafter.warm_up(warm.token_ids, warm.total_len)
    assert same(before, warm.drafter)
