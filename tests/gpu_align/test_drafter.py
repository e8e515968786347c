"""`Drafter`: the contract, on the references everywhere and on the kernels (interpreted or native)."""

import math
import random
from pathlib import Path

import pytest
import torch

import gpu_align
from gpu_align import Drafter, DrafterConfig, Source
from gpu_align.ops.layout import PAGE
from tests.gpu_align.step_harness import BACKENDS, device_of, poison, standing_of


class Engine:
    """The smallest engine: it owns the tensors and knows what the model will write."""

    def __init__(
        self, backend, *, max_slots=4, T=256, N=128, K=16, vocab=1000, config=None, max_prediction_tokens=None
    ):
        self.device = device_of(backend)
        self.K, self.T = K, T
        self.drafter = Drafter(
            max_slots=max_slots, max_context_len=T, max_prediction_len=N, num_draft_tokens=K, vocab_size=vocab,
            device=self.device, backend=backend, config=config, max_prediction_tokens=max_prediction_tokens,
        )  # fmt: skip
        poison(self.drafter)
        self.token_ids = torch.zeros((max_slots, T), dtype=torch.int32, device=self.device)
        self.total_len = torch.zeros(max_slots, dtype=torch.int32, device=self.device)
        self.prompt_len = [0] * max_slots

    def add(self, slot, prediction, prompt, output=()):
        held = self.drafter.add(slot, prediction, len(prompt))
        self.prompt_len[slot] = len(prompt)
        self.total_len[slot] = 0
        self.write(slot, [*prompt, *output])
        return held

    def write(self, slot, tokens):
        start = int(self.total_len[slot])
        self.token_ids[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len[slot] = start + len(tokens)

    def propose(self, slots, num_sampled=None):
        """[(tokens, length, confidence, source)] in batch order."""
        sampled = [1] * len(slots) if num_sampled is None else num_sampled
        draft = self.drafter.propose(
            self.token_ids,
            self.total_len,
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            torch.tensor(sampled, dtype=torch.int32, device=self.device),
        )
        return list(zip(*(t.tolist() for t in draft), strict=True))

    def generate(self, slot, output):
        """Verification steps that writing `output` takes: the prefill, then drafts. Returns what each offered."""
        offered = []
        self.write(slot, output[:1])
        done = 1
        while done < len(output):
            tokens, length, _, source = self.propose([slot])[0]
            accepted = 0
            while accepted < min(length, len(output) - done) and tokens[accepted] == output[done + accepted]:
                accepted += 1
            offered.append((done, tokens[:length], accepted, source))
            step = output[done : done + accepted + 1]
            self.write(slot, step)
            done += len(step)
        return offered


def distinct(n, start=0):
    return list(range(start, start + n))


def snapshot(drafter):
    """A copy of all that a drafter holds on its device."""
    return [tensor.clone() for tensor in drafter._state]


def same(before, drafter):
    """Whether a drafter holds what it held."""
    return all(torch.equal(a, b) for a, b in zip(before, drafter._state, strict=True))


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
            assert torch.equal(used.drafter._state.recent[0], fresh.drafter._state.recent[0])

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
            patch.setattr("gpu_align.drafter.build_index", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.add(0, distinct(60, 200), [])
        assert [length for _, length, *_ in engine.propose([0, 1])] == [0, 16]
        # What was uploaded in part is not taken for a prediction that is there.
        assert engine.add(0, distinct(60, 200), [], [200])
        assert engine.propose([0])[0][0] == distinct(16, 201)


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


class TestBadInput:
    def make(self, **change):
        sizes = {
            "max_slots": 2,
            "max_context_len": 8,
            "max_prediction_len": 4,
            "num_draft_tokens": 3,
            "vocab_size": 9,
        }
        return Drafter(**{**sizes, **change}, device="cpu")

    @pytest.mark.parametrize(
        ("args", "error", "words"),
        [
            ((2, [], 0), ValueError, ["slot", "2"]),
            ((-1, [], 0), ValueError, ["slot", "-1"]),
            ((True, [], 0), TypeError, ["slot", "bool"]),
            (("0", [], 0), TypeError, ["slot", "str"]),
            ((0, [1] * 5, 0), ValueError, ["prediction", "4", "5"]),
            ((0, [1, 9], 0), ValueError, ["prediction[1]", "9"]),
            ((0, [-1], 0), ValueError, ["prediction[0]", "-1"]),
            ((0, [2**40], 0), ValueError, ["prediction[0]"]),
            ((0, [2**70], 0), (ValueError, TypeError), ["prediction"]),
            ((0, [1.5], 0), TypeError, ["prediction", "float"]),
            ((0, [True], 0), TypeError, ["prediction", "bool"]),
            ((0, ["a"], 0), TypeError, ["prediction"]),
            ((0, [[1]], 0), TypeError, ["prediction", "2 dimensions"]),
            ((0, [[1], [1, 2]], 0), TypeError, ["prediction"]),
            ((0, None, 0), TypeError, ["prediction", "NoneType"]),
            ((0, [1], 9), ValueError, ["prompt_len", "8", "9"]),
            ((0, [1], -1), ValueError, ["prompt_len", "-1"]),
        ],
    )
    def test_add(self, args, error, words):
        drafter = self.make()
        drafter.add(0, [1, 2], 1)
        before, stats = snapshot(drafter), drafter.prediction_stats
        with pytest.raises(error) as caught:
            drafter.add(*args)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert same(before, drafter)
        assert drafter.prediction_stats == stats

    def test_remove(self):
        with pytest.raises(ValueError, match=r"slot: expected 0 <= slot < 2, found 7"):
            self.make().remove(7)

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"token_ids": torch.zeros((2, 8))}, TypeError, ["token_ids", "int32", "float32"]),
            (
                {"token_ids": torch.zeros((2, 7), dtype=torch.int32)},
                ValueError,
                ["token_ids", "[2, 8]", "[2, 7]"],
            ),
            ({"token_ids": torch.zeros((8, 2), dtype=torch.int32).T}, ValueError, ["token_ids", "stride"]),
            (
                {"token_ids": torch.zeros((2, 8), dtype=torch.int32, device="meta")},
                ValueError,
                ["cpu", "meta"],
            ),
            ({"total_len": torch.zeros(2)}, TypeError, ["total_len", "float32"]),
            (
                {"total_len": torch.tensor([9, 0], dtype=torch.int32)},
                ValueError,
                ["total_len[0]", "at most 8", "9"],
            ),
            ({"slots": torch.zeros(1, dtype=torch.int32)}, TypeError, ["slots", "int64", "int32"]),
            ({"slots": torch.tensor([5])}, ValueError, ["slots", "5"]),
            ({"slots": torch.tensor([-1])}, ValueError, ["slots", "-1"]),
            ({"num_sampled": torch.zeros(2, dtype=torch.int32)}, ValueError, ["num_sampled", "[1]", "[2]"]),
            (
                {
                    "slots": torch.zeros(3, dtype=torch.int64),
                    "num_sampled": torch.zeros(3, dtype=torch.int32),
                },
                ValueError,
                ["slots", "at most 2", "3"],
            ),
            ({"num_sampled": [1]}, TypeError, ["num_sampled", "list"]),
        ],
    )
    def test_propose(self, change, error, words):
        good = {
            "token_ids": torch.zeros((2, 8), dtype=torch.int32),
            "total_len": torch.zeros(2, dtype=torch.int32),
            "slots": torch.zeros(1, dtype=torch.int64),
            "num_sampled": torch.ones(1, dtype=torch.int32),
        }
        drafter = self.make()
        with pytest.raises(error) as caught:
            drafter.propose(**{**good, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
        drafter.propose(**good)

    @pytest.mark.parametrize(
        ("name", "most"),
        [
            ("max_slots", None),
            ("max_context_len", 2**25 - 1),
            ("max_prediction_len", 2**24 - 1),
            ("num_draft_tokens", 256),
            ("vocab_size", None),
            ("max_prediction_tokens", None),
        ],
    )
    def test_sizes(self, name, most):
        domain = "1 or more" if most is None else f"1 to {most}"
        with pytest.raises(ValueError, match=rf"^{name}: expected {domain}, found 0"):
            self.make(**{name: 0})
        if most is not None:
            with pytest.raises(ValueError, match=rf"^{name}: expected {domain}, found {most + 1}"):
                self.make(**{name: most + 1})

    def test_backend(self):
        with pytest.raises(ValueError, match="backend"):
            Drafter(
                max_slots=1, max_context_len=1, max_prediction_len=1, num_draft_tokens=1, vocab_size=1,
                device="cpu", backend="fast",
            )  # fmt: skip

    @pytest.mark.parametrize(
        "setting",
        [
            {"length_factor": -1},
            {"length_factor": 0.3},
            {"min_survival": 2},
            {"min_survival_lost": -0.5},
            {"min_match": 0},
            {"min_context_match": 65},
        ],
    )
    def test_config(self, setting):
        with pytest.raises(ValueError, match=next(iter(setting))):
            DrafterConfig(**setting)


def test_predictions_may_be_numpy_arrays():
    numpy = pytest.importorskip("numpy")
    engine = Engine("reference")
    engine.add(0, numpy.arange(20, dtype=numpy.int64), [])
    engine.write(0, [0])
    assert engine.propose([0])[0][0] == distinct(16, 1)


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
