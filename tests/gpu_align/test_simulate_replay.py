"""The replay loop: counts worked out by hand, the least steps, what a policy sees; and what is written of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_align.predictors import PredictorOptions, TokenPredictor
from gpu_align.simulate import Record, make_policies, replay
from gpu_align.tools import html
from gpu_align.tools import policies as lookup
from gpu_align.tools.html import Origin
from gpu_align.tools.simulate.tokenizers import line_end_test, load_tokenizer, token_texts


class Scripted(TokenPredictor):
    """Drafts ``drafts[i]`` at the i-th call, keeps what it is given, and then writes into it."""

    name = "scripted"

    def __init__(self, drafts: Sequence[list[int]]) -> None:
        self.drafts = list(drafts)

    def reset(self, prompt: Sequence[int], options: PredictorOptions) -> None:
        self.started = list(prompt), list(options.prediction)
        self.extended: list[list[int]] = []
        self.seen_at_propose: list[int] = []
        prompt[:] = [0] * len(prompt)

    def predict_tokens(self) -> list[int]:
        self.seen_at_propose.append(sum(map(len, self.extended)))
        return self.drafts[len(self.seen_at_propose) - 1]

    def push_tokens(self, tokens: Sequence[int]) -> None:
        self.extended.append(list(tokens))
        tokens[:] = [0] * len(tokens)


class Oracle(TokenPredictor):
    """Knows the output (given as the prediction) and counts: always K correct tokens, then past the end."""

    name = "oracle"
    source = int(Origin.PREDICTION)

    def reset(self, prompt: Sequence[int], options: PredictorOptions) -> None:
        self._known, self._at, self._k = list(options.prediction), 0, options.num_draft_tokens

    def predict_tokens(self) -> list[int]:
        return (self._known[self._at :] + [7] * self._k)[: self._k]

    def push_tokens(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)


def record(output: list[int], prediction: list[int] | None = None, prompt: list[int] | None = None) -> Record:
    return Record("r", prompt or [], output if prediction is None else prediction, output)


G, A = Origin.GENERATED, Origin.ACCEPTED


@pytest.mark.parametrize(
    ("output", "drafts", "prefill", "counts", "extended", "step_of", "origins"),
    [
        # prefill: 5 | draft 6 7 (both right) + 8 | draft 1 9 (wrong at once) + 9 | draft 3 0 (one right) + 4
        ([5, 6, 7, 8, 9, 3, 4], [[6, 7], [1, 9], [3, 0]], False, (4, 3, 3), [[5], [6, 7, 8], [9]],
         [0, 1, 1, 1, 2, 3, 3], [G, A, A, G, G, A, G]),
        ([5, 6, 7, 8], [[5, 6], [9]], True, (2, 2, 1), [[5, 6, 7]], [0, 0, 0, 1], [A, A, G, G]),
        # Ends with an accepted draft token: no token of the model's own.
        ([5, 6, 7], [[6, 7]], False, (2, 2, 0), [[5]], [0, 1, 1], [G, A, A]),
        # What lies behind the last output token does not count, and neither does it behind a mismatch.
        ([5, 6, 7], [[6, 7, 1, 2, 3]], False, (2, 2, 0), [[5]], [0, 1, 1], [G, A, A]),
        ([5, 6, 7], [[6, 1, 2, 3, 4]], False, (2, 1, 1), [[5]], [0, 1, 1], [G, A, G]),
        ([5, 6, 7], [[1, 7], []], False, (3, 0, 2), [[5], [6]], [0, 1, 2], [G, G, G]),
        ([5], [], False, (1, 0, 0), [], [0], [G]),
    ],
)  # fmt: skip
def test_counts_by_hand(
    output: list[int],
    drafts: list[list[int]],
    prefill: bool,
    counts: tuple[int, int, int],
    extended: list[list[int]],
    step_of: list[int],
    origins: list[Origin],
) -> None:
    policy, pair = Scripted(drafts), record(output, [1, 2], [3])
    result = replay(policy, pair, 5, prefill)
    assert (result.steps, result.accepted, result.rejected) == counts
    assert result.output_tokens == len(output)
    assert (result.step_of.tolist(), result.origins.tolist()) == (step_of, origins)
    assert len(result.propose_ns) == len(drafts) == len(policy.seen_at_propose)
    assert all(ns >= 0 for ns in result.propose_ns)
    # It saw what it may see, and could change nothing of it.
    assert (policy.started, policy.extended) == (([3], [1, 2]), extended)
    assert policy.seen_at_propose == [step_of.index(s) for s in range(not prefill, result.steps)]
    assert pair == record(output, [1, 2], [3])


@pytest.mark.parametrize("name", ["oracle", "gpu_align", "cursor", "static_text", "myers"])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_a_perfect_prediction_takes_the_minimum(name: str, k: int) -> None:
    for length in (1, 2, 16, 17, 18, 33, 64, 65, 66, 67, 131, 1000):
        # Distinct tokens, so that nothing but the cursor decides.
        perfect = record(list(range(100, 100 + length)), prompt=[1, 2, 3])
        policy = Oracle() if name == "oracle" else make_policies([name], [perfect], k)[0]
        for prefill, least in ((False, 1 + -(-(length - 1) // (k + 1))), (True, -(-length // (k + 1)))):
            result = replay(policy, perfect, k, prefill)
            assert (result.steps, result.rejected) == (least, 0)
            if name in ("oracle", "gpu_align"):
                assert set(result.origins.tolist()) <= {Origin.GENERATED, Origin.PREDICTION}


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"num_draft_tokens: expected 1 or more, found 0"):
        replay(Scripted([]), record([5, 6]), num_draft_tokens=0)
    monkeypatch.setattr(lookup.importlib, "import_module", lambda name: exec("raise ImportError(name)"))
    with pytest.raises(ImportError, match=r"benchmarks\.quality\.build_suffix_peer"):
        make_policies(["suffix_decoding"], [record([1])], 8)


def test_hostile_token_text_stays_text() -> None:
    hostile = [
        "<script>alert(1)</script>", "</pre>", '" onmouseover="x', "&lt;", "\n", "\x00\x1b[2J\r\x7f", "\ud800",
    ]  # fmt: skip
    document = html.page(
        "</title><script>1</script>",
        [
            html.tokens(hostile, [1] * len(hostile), list(range(len(hostile)))),
            html.details("<script>2</script>", "<b>", html.note("<i>")),
            html.table(["<u>"], [["<script>3</script>"]]),
            html.heading("<script>4</script>"),
            html.legend([0, 1]),
        ],
    )
    document.encode("utf-8")
    # Well-formed, so that no text has ended an element.
    body = ElementTree.fromstring(document[document.index("<body>") : document.index("</html>")])
    assert not {"script", "b", "i", "u"} & {element.tag for element in body.iter()}
    assert not any(name.startswith("on") for element in body.iter() for name in element.attrib)
    [tokens] = body.iter("pre")
    assert "".join(tokens.itertext()) == '\n<script>alert(1)</script></pre>" onmouseover="x&lt;\n␀␛[2J␍␡?'
    assert "<script" not in document


def test_text_of_tokens_is_the_text() -> None:
    pytest.importorskip("mistral_common")
    tekken = load_tokenizer("tekken")
    text = "def f():\n    return 'é 🙂 \u0939\u093f' # <s>\r\n\n"
    ids = tekken.encode(text)
    assert "".join(token_texts(tekken, ids)) == text
    assert len(token_texts(tekken, ids)) == len(ids)
    # Cut inside the emoji's bytes: shown as unreadable, not dropped, and no error.
    emoji = tekken.encode("\U0001fae8")
    assert len(emoji) > 1
    assert "".join(token_texts(tekken, emoji[:-1])) == "\ufffd"
    assert token_texts(tekken, [2**31 - 1]) == ["\ufffd"]
    assert token_texts(tekken, []) == []
    ids = tekken.encode("def f(x):\n    return (x)\n\n\ny = 1\n")
    ends = [*map(line_end_test(tekken), ids)]
    assert [("\n" in text) for text in token_texts(tekken, ids)] == ends
    assert len({*ends}) == 2
    assert not line_end_test(tekken)(2**31 - 1)


BYTE_LEVEL, SENTENCEPIECE = "byte-level", "sentencepiece"


@pytest.fixture(params=[BYTE_LEVEL, SENTENCEPIECE])
def tokenizer_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small tokenizer on disk of the two kinds that transformers knows."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    if request.param == BYTE_LEVEL:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    else:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>", *bytes_as_tokens])
    made.train_from_iterator(["def f(x): return x", "f(x) + f(y)"] * 5, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(tmp_path)
    return tmp_path


def test_transformers_tokenizers_from_a_folder(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    text = "def f(y): return é 🙂\nf(x)"
    ids = tokenizer.encode(text)
    assert "".join(token_texts(tokenizer, ids)) == text
    assert tokenizer.token_bytes(0) == b"<s>"
    newline = next(i for i in ids if b"\n" in tokenizer.token_bytes(i))
    assert {*filter(line_end_test(tokenizer), ids)} == {newline}
