"""Reading records, of a file, two texts or a Git history: what is allowed, and what is not, by its place."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from gpu_align.ops.layout import FIRST_GAP
from gpu_align.simulate import (
    EditError,
    Record,
    RecordError,
    load_tokenizer,
    read_records,
    records_of_files,
    records_of_git,
)
from gpu_align.skeletons import join
from gpu_align.tools.inputs import MAX_BYTES, json_lines
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
    found = [(record.prediction, record.memory) for record in read_records(path, with_views=True)]
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


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return [*text.encode()]


@pytest.fixture
def bytes_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_align.tools.simulate.records.load_tokenizer", lambda name: ByteTokenizer())


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
    assert (called.prediction, called.memory, called.related) == (call, True, True)
    assert formatted.prediction[:2] == [5, FIRST_GAP]
    assert (formatted.memory, formatted.related) == (plain.memory, plain.related) == (False, False)
    assert plain.prediction == []
