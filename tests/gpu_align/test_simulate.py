"""Records, of a file, two texts or a Git history; the replay loop, by hand; tokenizers and pages."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from gpu_align.ops.layout import FIRST_GAP, TextKind
from gpu_align.predictors import PredictorOptions, TokenPredictor
from gpu_align.texts.skeletons import join
from gpu_align.tools import html
from gpu_align.tools import policies as lookup
from gpu_align.tools.html import Origin
from gpu_align.tools.inputs import MAX_BYTES, json_lines
from gpu_align.tools.simulate.replay import (
    EditError,
    PolicyResult,
    Record,
    RecordError,
    load_tokenizer,
    make_policies,
    read_records,
    records_of_files,
    records_of_git,
    replay,
    verdict,
)
from gpu_align.tools.simulate.tokenizers import line_end_test, token_texts
from tests.modules import git

GOOD = {"id": "a", "prediction": [1, 2], "output": [1, 3]}
TEXT = {"id": 1, "prediction": [], "tokenizer": "tekken"}

TOOLS = [
    {
        "type": "function",
        "function": {"name": "ls", "parameters": {"properties": {"path": {"type": "string"}}}},
    }
]

#: Line → the place in it that the message names, or its words.
MALFORMED: list[tuple[object, str]] = [
    (b"{", "expected one JSON object"), (b"{} {}", "expected one JSON object"), (b"[1, 2]", "expected an object"),
    (b'{"id": "\xff"}', "expected UTF-8"), (b"[" * 200_000, "nested too deeply"),
    (b'{"id": "a", "prediction": [' + b"9" * 5000 + b'], "output": [1]}', "expected one JSON object"),
    ({"prediction": [], "output": [1]}, "id: "), ({**GOOD, "id": True}, "id: "),
    ({"id": "a", "output": [1]}, "prediction: "), ({"id": "a", "prediction": [1]}, "output: "),
    ({**GOOD, "output": []}, "output: "), ({**GOOD, "prediction": [2**31]}, "prediction[0]: "),
    ({**GOOD, "prompt": [-5]}, "prompt[0]: "), ({**GOOD, "output_text": "x"}, "output: "),
    ({**GOOD, "tokenizer": 3}, "tokenizer: "),
    ({"id": 1, "prediction_text": "x", "output": [1]}, "needs a tokenizer"),
    ({"id": 1, "instruction": "do", "before": "x"}, "after: "), ({**TEXT, "output_text": ""}, "output: "),
    ({**TEXT, "output_text": "x", "tokenizer": "/no/dir"}, "tokenizer: "),
    ({**GOOD, "predictions": [[1]]}, "predictions: "),
    ({"id": 1, "predictions": [[1], [-1]], "output": [1]}, "predictions[1][0]: "),
    ({"id": 1, "predictions_text": ["x"], "output": [1]}, "needs a tokenizer"),
    ({**GOOD, "tools": TOOLS}, "expected a tokenizer"),
    ({**TEXT, "output_text": "x", "tools": 5}, "skeleton: names"),
]  # fmt: skip


def lines(*records: object) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_views(tmp_path: Path) -> None:
    """Of a text that is predicted its forms, else those of the prompt's texts, as a memory; ids as they are."""
    encode = load_tokenizer("tekken").encode
    given = {"id": "a", "tokenizer": "tekken", "output_text": "x"}
    prompt = "On\r\n```\r\nanother\r\nline\r\n```\r\n"
    path = write(
        tmp_path / "pairs.jsonl",
        lines(
            {**given, "prompt_text": prompt, "prediction_text": "another\r\nline\r\n"},
            {**given, "prompt_text": prompt, "prediction_text": ""},
            {**given, "prompt_text": "Some\nprose.\n", "prediction_text": ""},
            {**given, "prompt_text": "", "prediction_text": ""},
            {**given, "prompt_text": prompt, "prediction": [1, 2]},
            {**GOOD, "prompt": [1]},
        ),
    )
    patch = " another\n line\n", "-another\n-line\n"
    in_strings = (text.replace("\n", "\\n") for text in ("another\nline\n", *patch))
    views = ("another\nline\n", *in_strings, *patch)
    forms = [token for text in views for token in encode(text)]
    found = [(record.prediction, record.kind > 0) for record in read_records(path, with_views=True)]
    assert found == [(forms, False), (forms, True), *[([], False)] * 2, *[([1, 2], False)] * 2]
    assert [len(record.prediction) for record in read_records(path)] == [len(encode(views[0])), 0, 0, 0, 2, 2]


def test_token_ids(tmp_path: Path) -> None:
    second = {"id": 7, "prediction": [], "output": [2**31 - 1], "prompt": [0, 5], "note": "ignored"}
    third = {"id": "c", "prediction": [1], "output": [1], "prompt": None}
    path = write(tmp_path / "pairs.jsonl.gz", lines(GOOD, b"", second, third))
    assert read_records(path) == [
        Record("a", [], [1, 2], [1, 3]),
        Record("7", [0, 5], [], [2**31 - 1]),
        Record("c", [], [1], [1]),
    ]


@pytest.mark.parametrize(("line", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_lines_are_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", lines(GOOD, line, {**GOOD, "output": []}))
    with pytest.raises(RecordError) as caught:
        read_records(path)
    assert caught.value.line == 2
    assert str(caught.value).startswith("line 2: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(b"", GOOD, b"  ", b"x"), r"^line 4: "),
        (b"", "expected at least one record, found none"),
        (b"\n\n", "expected at least one record, found none"),
        (gzip.compress(lines(*[GOOD] * 2000), mtime=0)[:-20], r"^line \d+: damaged gzip data"),
    ],
    ids=["blank lines count", "empty", "blank", "damaged"],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_records(write(tmp_path / "p.jsonl", content))


def test_gzip_data_of_far_too_much_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte took 1.6 GB of memory. As much as texts pack to is read, and whatever is not packed."""
    path = write(tmp_path / "p.jsonl.gz", b" " * 2**27)
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match=r"^line \d+: gzip data of far more text than texts pack to"):
            for _ in json_lines(path):
                pass
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()
    monkeypatch.setattr("gpu_align.tools.inputs.MAX_BYTES", 100)
    records = [{**GOOD, "id": number} for number in range(100)]
    assert len(read_records(write(path, lines(*records)))) == 100
    assert len(read_records(write(tmp_path / "p.jsonl", lines(*[GOOD] * 100)))) == 100


def test_text_is_encoded_by_the_tokenizer_named(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    tekken = load_tokenizer("tekken")
    by_option = {
        "id": "a",
        "prediction_text": "a = 1\r\nb = 2\r",
        "output_text": "a = 1\n",
        "prompt_text": "Hi",
    }
    by_record = {"id": "b", "prediction": [], "output_text": "<s>é\n", "tokenizer": "tekken"}
    path = write(tmp_path / "p.jsonl", lines(by_option))
    (first,) = read_records(path, tokenizer="tekken")
    assert first.prediction == tekken.encode("a = 1\nb = 2\n")
    assert (first.prompt, first.tokenizer) == (tekken.encode("Hi"), "tekken")
    (second,) = read_records(write(tmp_path / "q.jsonl", lines(by_record)))
    assert second.output == tekken.encode("<s>é\n")
    assert min(second.output) >= 1000  # text that looks like a special token stays text


@pytest.fixture
def bytes_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(encode=lambda text: [*text.encode()])
    monkeypatch.setattr("gpu_align.tools.simulate.records.load_tokenizer", lambda name: made)


BYTES = pytest.mark.usefixtures("bytes_as_tokens")


def commit(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "--short=10", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, a_py=b"a = 1\r\n", b_txt=b"one", c_bin=b"\0\1", e_py=b"")
    return folder


@BYTES
def test_two_files(tmp_path: Path) -> None:
    before, after = tmp_path / "old.py", tmp_path / "new.py"
    before.write_bytes(b"\xef\xbb\xbf" + b"a = 1\r\n")
    after.write_bytes(b"a = 2\n")
    [record] = records_of_files(before, after, "bytes")
    assert (record.id, record.prompt, record.tokenizer) == ("new.py", [], "bytes")
    assert bytes(record.prediction) == b"a = 1\n"
    assert bytes(record.output) == b"a = 2\n"
    before.write_bytes(b"")
    assert records_of_files(before, after, "bytes")[0].prediction == []


@BYTES
def test_the_edits_of_commits_newest_first(repo: Path) -> None:
    second = commit(repo, a_py=b"a = 2\r\n", c_bin=b"\0\2", d_py=b"new")
    third = commit(repo, a_py=b"a = 3\n", b_txt=b"two", e_py=b"no longer empty")
    found = records_of_git("HEAD~2..HEAD", repo, "bytes")
    assert [record.id for record in found] == [f"{third}:a.py", f"{third}:b.txt", f"{second}:a.py"]
    assert [bytes(r.prediction) for r in found] == [b"a = 2\n", b"one", b"a = 1\n"]
    assert [bytes(r.output) for r in found] == [b"a = 3\n", b"two", b"a = 2\n"]
    assert [r.id for r in records_of_git("HEAD~2..", repo, "bytes", [".txt"])] == [f"{third}:b.txt"]
    assert len(records_of_git("HEAD", repo, "bytes", limit=2)) == 2


@BYTES
def test_links_and_large_files_are_left_out(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "link.py").symlink_to("a.py")
    commit(repo)
    (repo / "link.py").unlink()
    (repo / "link.py").symlink_to("b.txt")
    commit(repo, a_py=b"a = 2222\n")
    assert len(records_of_git("HEAD~1..", repo, "bytes")) == 1
    most = "gpu_align.tools.simulate.records.MAX_FILE_BYTES"
    monkeypatch.setattr(most, len(b"a = 2222\n"))
    assert len(records_of_git("HEAD~1..", repo, "bytes")) == 1
    monkeypatch.setattr(most, len(b"a = 2222\n") - 1)
    with pytest.raises(EditError, match=r"--git: HEAD~1\.\. changes no text file"):
        records_of_git("HEAD~1..", repo, "bytes")


def test_tools_and_schemas_are_drafted_from(tmp_path: Path) -> None:
    """As in a server: behind a prediction, else as a text that is likely, where a match comes first."""
    schema = {"properties": {"a": {"type": "string"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    path = tmp_path / "records.jsonl"
    given = [
        {**TEXT, "output_text": "x", "tools": TOOLS},
        {**TEXT, "output_text": "x", "prediction": [5], "response_format": asked},
        {**TEXT, "output_text": "x"},
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in given))
    tokenizer = load_tokenizer("tekken")
    called, formatted, plain = read_records(path)
    call = join(['[TOOL_CALLS]ls{"path": "', '"}'], lambda texts: [*map(tokenizer.encode, texts)])
    assert (called.prediction, called.kind) == (call, TextKind.SKELETON)
    assert formatted.prediction[:2] == [5, FIRST_GAP]
    assert formatted.kind == plain.kind == TextKind.PREDICTION
    assert plain.prediction == []


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
        # Drafts after the last output token do not count, nor do those after a mismatch.
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


@pytest.mark.parametrize("name", ["gpu_align", "cursor", "static_text", "myers"])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_a_perfect_prediction_takes_the_minimum(name: str, k: int) -> None:
    for length in (1, 2, 16, 17, 18, 33, 64, 65, 66, 67, 131, 1000):
        # Distinct tokens, so that nothing but the cursor decides.
        perfect = record(list(range(100, 100 + length)), prompt=[1, 2, 3])
        [policy] = make_policies([name], [perfect], k)
        for prefill, least in ((False, 1 + -(-(length - 1) // (k + 1))), (True, -(-length // (k + 1)))):
            result = replay(policy, perfect, k, prefill)
            assert (result.steps, result.rejected) == (least, 0)
            if name == "gpu_align":
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


@pytest.mark.parametrize(
    ("steps", "end"),
    [((2,), "."), ((2, 2), "; b, the next, takes as many."), ((2, 3), "; b, the next, takes 50% more.")],
)
def test_the_verdict_names_the_next_one(steps: tuple[int, ...], end: str) -> None:
    results = [PolicyResult(name, []) for name, _ in zip("ab", steps, strict=False)]
    for result, count in zip(results, steps, strict=True):
        result.steps, result.output_tokens = count, 9
    assert verdict(results) == f"a: 2 forward passes instead of 9{end}"
