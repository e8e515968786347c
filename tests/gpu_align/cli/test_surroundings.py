"""What surrounds a command: Git's settings and variables, pipes, proxies, consoles, code in a tokenizer's folder.

None of it changes what is read, and none of it ends in a traceback.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from gpu_align.tools import inputs, main
from gpu_align.tools.bench.client import BenchError, Client, http_client, proxy_for
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from tests.modules import ROOT, command, git

# Git

#: The user's configuration, and variables; in them HERE is the repository that is asked for, OTHER another one.
GIT: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "as it comes": ({}, {}),
    "signatures in every log": ({"log.showSignature": "true"}, {}),
    "another encoding": ({"i18n.logOutputEncoding": "UTF-16"}, {}),
    "colours": ({"color.ui": "always", "color.diff": "always"}, {}),
    "another format": ({"format.pretty": "fuller", "log.date": "raw", "log.decorate": "full"}, {}),
    "pager": ({"core.pager": "false", "pager.log": "true", "pager.rev-list": "false"}, {}),
    "external diff": ({"diff.external": "false", "diff.noprefix": "true", "diff.renames": "copies"}, {}),
    "aliases": ({"alias.rev-list": "!false", "alias.diff-tree": "!false", "alias.cat-file": "!false"}, {}),
    "abbreviated": ({"core.abbrev": "4", "core.quotePath": "true"}, {}),
    "mail map": ({"log.mailmap": "true", "mailmap.file": "/nonexistent"}, {}),
    "a hook": ({}, {"GIT_DIR": "OTHER/.git", "GIT_INDEX_FILE": "OTHER/.git/index", "GIT_PREFIX": "x/"}),
    "a hook's work tree": ({}, {"GIT_DIR": ".git", "GIT_WORK_TREE": "OTHER"}),
    "a push": ({}, {"GIT_OBJECT_DIRECTORY": "OTHER/.git/objects", "GIT_QUARANTINE_PATH": "OTHER"}),
    "a namespace": ({}, {"GIT_NAMESPACE": "none", "GIT_COMMON_DIR": "OTHER/.git"}),
    "settings of git -c": ({}, {"GIT_CONFIG_PARAMETERS": "'core.bare=true' 'broken"}),
    "traces": ({"trace2.normalTarget": "1"}, {"GIT_TRACE": "1", "GIT_TRACE_SETUP": "1"}),
    "pagers": ({}, {"GIT_PAGER": "false", "PAGER": "false", "GIT_EXTERNAL_DIFF": "false"}),
    "another language": ({}, {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de", "GIT_LITERAL_PATHSPECS": "1"}),
    "replaced line ends": ({"core.autocrlf": "true", "core.eol": "crlf"}, {}),
}
SUBJECTS = (
    "plain",
    "tab\tand \x1b[31mred\x1b[0m",
    "a line separator \u2028 next line \x85 form feed \x0c file separator \x1c vertical tab \x0b here",
    "-p --stat %H %s",
    "ümlaut 語 🙂",
)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("git")
    for name, word in ("here", b"here"), ("other", b"other"):
        (folder / name).mkdir()
        git(folder / name, "init", "-q")
        for number, subject in enumerate(("begin", *SUBJECTS)):
            (folder / name / "odd \t\u2028.py").write_bytes(b"%s = %d\n" % (word, number))
            git(folder / name, "add", "-A")
            git(folder / name, "commit", "-q", "--cleanup=verbatim", "-m", subject)
    return folder


@pytest.mark.parametrize("name", GIT)
def test_git_reads_the_repository_that_is_named(
    name: str, repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, variables = GIT[name]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for key, value in settings.items():
        subprocess.run(["git", "config", "--global", key, value], check=True)
    for key, value in variables.items():
        monkeypatch.setenv(key, value.replace("OTHER", str(repositories / "other")))
    found = inputs.git_edits(f"HEAD~{len(SUBJECTS)}..", repositories / "here", 100, 1000)
    assert [edit.subject for edit in found] == [*reversed(SUBJECTS)]
    assert [edit.after for edit in found] == [f"here = {n}\n" for n in range(len(SUBJECTS), 0, -1)]
    assert {edit.path for edit in found} == {"odd \t\u2028.py"}


def test_a_commit_in_another_encoding(repositories: Path, tmp_path: Path) -> None:
    repo = tmp_path / "latin"
    shutil.copytree(repositories / "here", repo)
    (repo / "odd \t\u2028.py").write_bytes(b"here = 9\n")
    (tmp_path / "message").write_bytes("Grüße\n".encode("latin-1"))
    git(repo, "-c", "i18n.commitEncoding=ISO-8859-1", "commit", "-q", "-a", "-F", str(tmp_path / "message"))
    assert [edit.subject for edit in inputs.git_edits("HEAD~1..", repo, 1, 1000)] == ["Grüße"]


@pytest.mark.skipif(not hasattr(os, "chown") or os.getuid() != 0, reason="only root gives a folder away")
def test_a_repository_of_someone_else_is_one_error_until_it_is_trusted(
    repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "given"
    shutil.copytree(repositories / "here", repo)
    for place in (repo, repo / ".git"):
        os.chown(place, 54321, 54321)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(inputs.EditError, match=r"^--git: detected dubious ownership"):
        inputs.git_edits("HEAD~1..", repo, 1, 1000)
    for key, value in ("COUNT", "1"), ("KEY_0", "safe.directory"), ("VALUE_0", str(repo)):
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    assert len(inputs.git_edits("HEAD~1..", repo, 1, 1000)) == 1


# Pipes

RECORD = b'{"id": "a", "prediction": [1, 2, 3], "output": [1, 2, 3]}\n'


def through_a_pipe(*chunks: bytes) -> Path:
    """A pipe as the shell passes one; the writer gives it these chunks."""
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb", buffering=0) as stream:
            for chunk in chunks:
                stream.write(chunk)

    threading.Thread(target=write, daemon=True).start()
    return Path(f"/dev/fd/{reading}")


PACKED = gzip.compress(RECORD)
#: What is written into a pipe, chunk by chunk, and how many records it is.
CHUNKS: dict[str, tuple[tuple[bytes, ...], int]] = {
    "plain": ((RECORD,), 1),
    "long": ((RECORD * 5000,), 5000),  # more than a pipe holds
    "two chunks": ((RECORD[:1], RECORD[1:]), 1),
    "gzip": ((gzip.compress(RECORD * 3),), 3),
    "gzip in two chunks": ((PACKED[:1], PACKED[1:]), 1),
    "marked": ((b"\xef\xbb\xbf" + RECORD,), 1),
    "two members": ((PACKED + PACKED,), 2),
    "nothing": ((b"",), 0),
}


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
@pytest.mark.parametrize("what", CHUNKS)
def test_records_through_a_pipe(what: str) -> None:
    chunks, lines = CHUNKS[what]
    assert len([*inputs.json_lines(through_a_pipe(*chunks))]) == lines


SAMPLES = b'{"prompt": "p", "samples": ["a b c d", "a b c d"]}\n' * 3
OLD, NEW = b"def a():\n    return 1\n", b"def a():\n    return 2\n"


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
@pytest.mark.parametrize(
    ("line", "contents", "said"),
    [
        ("simulate PIPE --policy openai", RECORD, "openai: 2 forward passes"),
        ("simulate PIPE --policy openai", gzip.compress(RECORD), "openai: 2 forward passes"),
        ("simulate --before PIPE --after new.py --policy openai", OLD, "openai: "),
        ("simulate --before old.py --after PIPE --policy openai", NEW, "openai: "),
        ("tune PIPE --out table.json", RECORD, "error: "),  # too few, not none
        (
            "recipes observe PIPE --tokenizer tekken --out pack.json",
            gzip.compress(SAMPLES),
            "wrote pack.json",
        ),
        ("recipes learn PIPE old.py --out pack.json", NEW, "read 2 files, 44 bytes"),
        ("report PIPE", b"1\n", "expected"),
    ],
    ids=["records", "gzip", "before", "after", "tune", "observe", "learn", "report"],
)
def test_commands_read_pipes(
    line: str, contents: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_bytes(OLD)
    Path("new.py").write_bytes(NEW)
    result = command(*line.replace("PIPE", str(through_a_pipe(contents))).split())
    assert said in result.output
    assert "found none" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


# Proxies

HTTP = {"HTTP_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        ("http://server/v1", {}, None),
        ("http://server/v1", HTTP, "http://proxy:3128"),
        ("http://server/v1", {"http_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://server/v1", HTTP, None),
        ("https://server/v1", {"ALL_PROXY": "http://all:1"}, "http://all:1"),
        ("http://localhost:8000/v1", HTTP, None),
        ("http://web.localhost/v1", HTTP, None),
        ("http://127.0.0.2:8000/v1", HTTP, None),
        ("http://[::1]:8000/v1", HTTP, None),
        ("http://server/v1", {**HTTP, "NO_PROXY": "fe80::/10,::1"}, "http://proxy:3128"),
        ("http://[fe80::7]/v1", {**HTTP, "NO_PROXY": "fe80::/10"}, None),
        ("http://[fd00::7]/v1", {**HTTP, "NO_PROXY": "fe80::/10, [fd00::7]"}, None),
        ("http://10.1.2.3/v1", {**HTTP, "NO_PROXY": "10.0.0.0/8"}, None),
        ("http://10.1.2.3/v1", {**HTTP, "NO_PROXY": "10.9.2.3/8"}, None),  # bits behind the network
        ("http://11.1.2.3/v1", {**HTTP, "NO_PROXY": "10.0.0.0/8"}, "http://proxy:3128"),
        ("http://server/v1", {**HTTP, "NO_PROXY": "*"}, None),
        ("http://a.example.org/v1", {**HTTP, "no_proxy": "example.org"}, None),
        ("http://a.example.org/v1", {**HTTP, "NO_PROXY": "*.example.org"}, None),
        ("http://a.example.org./v1", {**HTTP, "NO_PROXY": " .Example.org ,"}, None),
        ("http://badexample.org/v1", {**HTTP, "NO_PROXY": "example.org"}, "http://proxy:3128"),
        ("http://server:8000/v1", {**HTTP, "NO_PROXY": "server:8000"}, None),
        ("http://server:8001/v1", {**HTTP, "NO_PROXY": "server:8000"}, "http://proxy:3128"),
        ("http://server/v1", {**HTTP, "NO_PROXY": "http://server"}, None),
        ("http://server/v1", {**HTTP, "NO_PROXY": "[,::/x,1.2.3/99,%"}, "http://proxy:3128"),
    ],
)
def test_the_proxy_of_the_environment(
    url: str, variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy
    http_client(url)  # httpx would fail at some of these


@pytest.mark.parametrize(
    ("url", "variables", "said"),
    [
        ("http://server/v1", {"HTTP_PROXY": "foo://x:1"}, "Unknown scheme"),
        ("http://server/v1", {"HTTP_PROXY": "http://[::1"}, "http://server/v1: no client"),
        ("http://server/v1", {"HTTP_PROXY": "http://x:port"}, "Invalid port"),
        ("http://server/v1", {"HTTP_PROXY": "socks5://x:1"}, "socksio"),
        ("https://server/v1", {"SSL_CERT_FILE": "/nonexistent"}, "https://server/v1: no client"),
        ("https://server/v1", {"SSL_CERT_FILE": "/dev/null"}, "https://server/v1: no client"),
        ("http://[::1/v1", {}, "Invalid IPv6 URL"),
    ],
)
def test_a_proxy_or_certificates_that_are_none(
    url: str, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name, value in variables.items():
        monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv(name, value)
    with pytest.raises(BenchError, match=said):
        http_client(url)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", "nul\0"])
def test_a_key_that_is_no_header(key: str) -> None:
    with pytest.raises(BenchError, match="API key") as refused:
        Client("http://localhost:9/v1", key, 1)
    assert key not in str(refused.value)


# Consoles


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "cp437", "shift_jis", "utf-16", "utf-8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_console_of_any_encoding(
    encoding: str, errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records.jsonl").write_bytes(RECORD)
    shown, told = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding, errors=errors))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(told, encoding=encoding, errors=errors))
    monkeypatch.setattr(
        sys, "argv", ["gpu-align", "simulate", str(tmp_path / "records.jsonl"), "--policy", "openai"]
    )
    assert main() == 0
    sys.stdout.flush()
    text = shown.getvalue().decode(encoding)
    assert "openai: 2 forward passes instead of 3." in text
    assert "s/draft" in text


@pytest.mark.parametrize(
    ("variables", "shell"),
    [
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, ""),
        ({"LC_ALL": "xx_YY.klingon"}, ""),
        ({"HOME": "/dev/null", "TMPDIR": "/nonexistent", "NUMBA_CACHE_DIR": "/nonexistent"}, ""),
        ({"COLUMNS": "0", "LINES": "x", "TERM": ""}, "<&-"),
        ({"FORCE_COLOR": "1", "COLUMNS": "1"}, ">&-"),
        ({"OMP_NUM_THREADS": "x", "PYTHONOPTIMIZE": "2"}, "2>&-"),
        ({"PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": "99"}, "<&- >&- 2>&-"),
    ],
)
@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_process_in_an_odd_environment(variables: dict[str, str], shell: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(RECORD)
    for name in ("random", "typing", "rich", "torch"):  # what is in the current folder is not imported
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong place')")
    code = "import sys; sys.path.remove(''); from gpu_align.tools import main; sys.exit(main())"
    line = f'"{sys.executable}" -c "{code}" simulate records.jsonl --policy openai {shell}'
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    done = subprocess.run(
        ["sh", "-c", line], env={**kept, "PYTHONPATH": str(ROOT), **variables}, cwd=tmp_path,
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=300,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert ("openai: 2 forward passes" in done.stdout) == (">&-" not in f" {shell}".replace(" 2>&-", ""))


# Tokenizers with code of their own

OWN_CODE = """
from transformers import PreTrainedTokenizer
class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = property(lambda self: 256)
    def get_vocab(self): return {chr(i): i for i in range(256)}
    def _tokenize(self, text, **more): return [chr(byte) for byte in text.encode()]
    def _convert_token_to_id(self, token): return ord(token)
    def _convert_id_to_token(self, index): return chr(index)
"""


@pytest.mark.parametrize(
    "line",
    [
        "simulate --before old.py --after new.py --policy openai --tokenizer ./own",
        "simulate texts.jsonl --policy openai",  # the records name it
        "simulate texts.jsonl --policy openai --tokenizer tekken",
        "recipes observe samples.jsonl --tokenizer ./own --out pack.json",
        "recipes show words.json --tokenizer ./own",
        "recipes report words.json outputs.jsonl --tokenizer ./own",
    ],
)
def test_a_tokenizer_with_code_of_its_own_is_not_asked_about(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    Path("own").mkdir()
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    Path("own/tokenizer_config.json").write_text(json.dumps(config))
    Path("own/own.py").write_text(OWN_CODE)
    Path("old.py").write_bytes(OLD)
    Path("new.py").write_bytes(NEW)
    Path("samples.jsonl").write_bytes(SAMPLES)
    Path("outputs.jsonl").write_text('{"task": "t", "prompt": "p", "output": "a b c"}')
    # A few recipes: this tokenizer would take half a minute for those of the shipped pack.
    for name in "abc":
        Path(f"{name}.py").write_bytes(OLD)
    assert command("recipes", "learn", "a.py", "b.py", "c.py", "--out", "words.json").exit_code == 0
    record = {"id": 1, "prediction_text": "a b", "output_text": "a b c", "tokenizer": "./own"}
    Path("texts.jsonl").write_text(json.dumps(record))
    load_tokenizer.cache_clear()
    asked: list[Callable[..., Any]] = []
    monkeypatch.setattr("builtins.input", asked.append)
    refused = command(*line.split())
    assert refused.exit_code == 2, refused.output
    assert refused.stderr.count("\n") == 1
    assert "runs with --trust-remote-code only" in refused.stderr
    allowed = command(*line.split(), "--trust-remote-code")
    assert allowed.exit_code == 0, allowed.output
    assert not asked
