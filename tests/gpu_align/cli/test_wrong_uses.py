"""Wrong uses of every command: one line on stderr, a non-zero exit code, no traceback, and no file written.

Each line of `WRONG` is a command line in a folder with the files of `folder`.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from gpu_align import RecipePack
from gpu_align.tools.cli import app
from gpu_align.tools.doctor import Finding

#: Wrong after every command.
ALWAYS = ("--no-such-option", "--no-such-option=3", "-Z", "--hlep", "--help=3", "--verison", "-?")

WRONG: dict[str, str] = {
    "simulate": """

        loop
        missing.jsonl
        folder
        empty.jsonl
        words.jsonl
        list.jsonl
        binary.bin
        broken.gz
        pairs.jsonl pairs.jsonl
        text.jsonl --policy cursor
        pairs.jsonl -k
        pairs.jsonl -k 0
        pairs.jsonl -k -1
        pairs.jsonl -k 257
        pairs.jsonl -k many
        pairs.jsonl -k 1.5
        pairs.jsonl --policy nobody
        pairs.jsonl --policy no_such_module:Class
        pairs.jsonl --policy json:nothing
        pairs.jsonl --policy json:loads
        pairs.jsonl --policy recipe_pack --recipes off
        pairs.jsonl --length-factor -1
        pairs.jsonl --length-factor 0.3
        pairs.jsonl --length-factor inf
        pairs.jsonl --length-factor eight
        pairs.jsonl --min-survival 2
        pairs.jsonl --min-survival nan
        pairs.jsonl --min-survival-recipe -0.1
        pairs.jsonl --recipes missing.json.gz
        text.jsonl --tokenizer tekken --recipes missing.json.gz --policy recipe_pack
        text.jsonl --tokenizer tekken --recipes words.jsonl --policy recipe_pack
        pairs.jsonl --tokenizer /no/such/folder
        pairs.jsonl --tokenizer ''
        pairs.jsonl --tokenizer folder
        pairs.jsonl --json
        pairs.jsonl --json no/folder/out.json
        pairs.jsonl --json folder
        pairs.jsonl --json pairs.jsonl
        pairs.jsonl --json out --html out
        --before old.py
        --after old.py
        pairs.jsonl --before old.py --after old.py
        pairs.jsonl --git HEAD
        --before missing.py --after old.py
        --before binary.bin --after old.py
        --before old.py --after empty.jsonl
        --before folder --after old.py
        --before old.py --after old.py --json old.py
        --git HEAD~1.. --repo folder
        --git HEAD~1.. --repo missing
        --git=--output=out HEAD
        --git ''
        --git HEAD --limit 0
        pairs.jsonl --repo folder
        pairs.jsonl --suffix .py
        pairs.jsonl --limit 3
    """,
    "policies": """
        nobody
        openai nobody
        Cursor
        ''
        'gpu_align.policies:OpenAI'
        --json=out.json
        --json out.json
        --policy openai
        -j
        --all
        --names openai
        --html out
        -k 3
        --version
    """,
    "recipes learn": """

        out.json
        out.txt old.py
        out old.py
        old.py out.json
        out.json missing.py
        out.json old.py missing.py
        text.json text.json
        folder.json old.py
        no/folder/out.json old.py
        out.json binary.bin
        out.json empty.jsonl
        out.json folder
        out.json old.py
        out.json old.py --suffix
        out.json . --suffix .nothing
        out.json old.py --out other.json
        out.json.xz old.py
        '' old.py
        out.json ''
    """,
    "recipes observe": """

        samples.jsonl
        samples.jsonl --out out.json
        samples.jsonl --tokenizer tekken
        --out out.json --tokenizer tekken
        missing.jsonl --out out.json --tokenizer tekken
        folder --out out.json --tokenizer tekken
        empty.jsonl --out out.json --tokenizer tekken
        words.jsonl --out out.json --tokenizer tekken
        list.jsonl --out out.json --tokenizer tekken
        pairs.jsonl --out out.json --tokenizer tekken
        broken.gz --out out.json --tokenizer tekken
        binary.bin --out out.json --tokenizer tekken
        samples.jsonl --out out.txt --tokenizer tekken
        samples.jsonl --out no/folder/out.json --tokenizer tekken
        samples.jsonl --out folder.json --tokenizer tekken
        text.json --out text.json --tokenizer tekken
        samples.jsonl --out out.json --tokenizer /no/such/folder
        samples.jsonl --out out.json --tokenizer tekken --agree 0
        samples.jsonl --out out.json --tokenizer tekken --agree 1.5
        samples.jsonl --out out.json --tokenizer tekken --agree nan
        samples.jsonl --out out.json --tokenizer tekken --agree most
        samples.jsonl more.jsonl --out out.json --tokenizer tekken
    """,
    "recipes merge": """

        pack.json.gz
        --out out.json
        pack.json.gz --out
        pack.json.gz missing.json --out out.json
        missing.json --out out.json
        folder --out out.json
        old.py --out out.json
        text.json --out out.json
        words.jsonl --out out.json
        binary.bin --out out.json
        broken.gz --out out.json
        empty.jsonl --out out.json
        misses.json --out out.json
        pack.json.gz --out out.txt
        pack.json.gz --out pack.json.gz
        pack.json.gz --out no/folder/out.json
        pack.json.gz --out folder.json
        pack.json.gz --out out.json --shapes-only=3
        pack.json.gz --out out.json --tokenizer tekken
        '' --out out.json
    """,
    "recipes report": """

        pack.json.gz
        pack.json.gz outputs.jsonl
        pack.json.gz --tokenizer tekken
        missing.json outputs.jsonl --tokenizer tekken
        old.py outputs.jsonl --tokenizer tekken
        folder outputs.jsonl --tokenizer tekken
        misses.json outputs.jsonl --tokenizer tekken
        pack.json.gz missing.jsonl --tokenizer tekken
        pack.json.gz folder --tokenizer tekken
        pack.json.gz empty.jsonl --tokenizer tekken
        pack.json.gz words.jsonl --tokenizer tekken
        pack.json.gz pairs.jsonl --tokenizer tekken
        pack.json.gz samples.jsonl --tokenizer tekken
        pack.json.gz broken.gz --tokenizer tekken
        pack.json.gz outputs.jsonl --tokenizer /no/such/folder
        pack.json.gz outputs.jsonl --tokenizer tekken -k 0
        pack.json.gz outputs.jsonl --tokenizer tekken -k 257
        pack.json.gz outputs.jsonl --tokenizer tekken -k many
        pack.json.gz outputs.jsonl --tokenizer tekken --json outputs.jsonl
        pack.json.gz outputs.jsonl --tokenizer tekken --json no/folder/out
        pack.json.gz outputs.jsonl --tokenizer tekken --json out --misses out
        pack.json.gz outputs.jsonl more.jsonl --tokenizer tekken
    """,
    "recipes show": """

        missing.json
        folder
        old.py
        text.json
        words.jsonl
        binary.bin
        broken.gz
        empty.jsonl
        misses.json
        ''
        pack.json.gz pack.json.gz
        pack.json.gz --top
        pack.json.gz --top -1
        pack.json.gz --top all
        pack.json.gz --top 1.5
        pack.json.gz --tokenizer
        pack.json.gz --tokenizer /no/such/folder
        pack.json.gz --json out
    """,
    "recipes index": """

        missing
        old.py
        pack.json.gz
        binary.bin
        empty.jsonl
        ''
        folder folder
        folder --out out.json
        folder -o
        folder --json
        folder --top 3
        folder --tokenizer tekken
        folder --version
    """,
    "tune": """

        pairs.jsonl
        pairs.jsonl -o
        pairs.jsonl -o out.yaml
        pairs.jsonl -o out.json
        missing.jsonl -o out.json
        pairs.jsonl missing.jsonl -o out.json
        empty.jsonl -o out.json
        words.jsonl -o out.json
        list.jsonl -o out.json
        binary.bin -o out.json
        broken.gz -o out.json
        folder -o out.json
        text.jsonl -o out.json
        text.jsonl -o out.json --tokenizer /no/such/folder
        text.jsonl -o out.json --tokenizer ''
        text.jsonl -o out.json --tokenizer folder
        pairs.jsonl -o no/folder/out.json
        pairs.jsonl -o pairs.jsonl
        pairs.jsonl -o folder
        pairs.jsonl -o ''
        '' -o out.json
        old.py -o out.json
        pairs.jsonl -o out.json --pack
        pairs.jsonl -o out.json --pack out.json
        pairs.jsonl -o out.json --pack pairs.jsonl
        pairs.jsonl -o out.json --pack own.gz
        pairs.jsonl -o out.json --pack folder.json
        pairs.jsonl -o out.json --pack base.json.gz
        pairs.jsonl -o out.json --pack no/folder/own.json
        pairs.jsonl -o out.json --pack own.json
        pairs.jsonl -o out.json --pack own.json --tokenizer folder
        pairs.jsonl -o out.json --pack own.json --tokenizer tekken
        logs -o out.json --pack own.json
    """,
    "report": """

        loop
        deep.yaml
        missing.yaml
        old.py
        binary.bin
        empty.jsonl
        pairs.jsonl
        broken.gz
        folder
        steps.yaml steps.yaml
        steps.yaml --html
        steps.yaml --html steps.yaml
        steps.yaml --html no/folder/page.html
        steps.yaml --html folder
        steps.yaml --html out --json out
        steps.yaml --json steps.yaml
        steps.yaml --tokenizer /no/such/folder
        steps.yaml --top 3
        logs --top -1
        logs --top all
        logs --tokenizer tekken
        logs --html logs
        ''
    """,
    "demo": """
        org/name
        folder
        --model
        --model ''
        --model /no/such/folder
        --model ./missing
        --model folder
        --model old.py
        --model a/b/c
        --model 'two words'
        --model https://huggingface.co/a/b
        --model -name
        --model .hidden
        --out
        --out ''
        --out old.py
        --out old.py/deeper
        --out-dir out
        --ngram=3
        --no-ngram=yes
        --ngram --no-ngram nothing
        --json out.json
        --version
    """,
    "doctor": """
        now
        vllm torch
        ''
        --json=out.json
        --json out.json
        --deep=yes
        --deep vllm
        --verbose=2
        -x
        -vx
        -h
        --quiet
        --version
        --html page.html
        --tokenizer tekken
        --verbos
    """,
}  # fmt: skip

CASES = [
    (command, line.strip())
    for command, lines in WRONG.items()
    for line in (*lines.split("\n")[1:-1], *ALWAYS)
]


def cases_of(command: str) -> list[str]:
    return [line for name, line in CASES if name == command]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command lines above find."""
    folder = tmp_path_factory.mktemp("wrong")
    texts = {
        "pairs.jsonl": json.dumps({"id": "a", "prediction": [1, 2], "output": [1, 3]}),
        "text.jsonl": json.dumps({"id": "a", "prediction_text": "a b", "output_text": "a c"}),
        "samples.jsonl": json.dumps({"samples": ["a b c", "a b c"]}),
        "outputs.jsonl": json.dumps({"output": "a b c"}),
        "words.jsonl": "not JSON",
        "list.jsonl": "[1, 2]",
        "empty.jsonl": "",
        "text.json": '"text"',
        "old.py": "a = 1\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "deep.yaml").write_text("[" * 30_000)
    (folder / "loop").symlink_to("loop")
    (folder / "binary.bin").write_bytes(b"\xff\xfe\x00\x01" * 8)
    (folder / "broken.gz").write_bytes(gzip.compress(b"{}\n" * 100)[:-12])
    (folder / "folder").mkdir()
    (folder / "folder.json").mkdir()
    (folder / "logs").mkdir()
    log = (Path(__file__).parents[1] / "step_log.yaml").read_text(encoding="utf-8")
    for name in ("steps.yaml", "logs/steps.yaml"):
        (folder / name).write_text(log, encoding="utf-8")
    RecipePack({}, []).save(folder / "pack.json.gz")
    from gpu_align.recipes import Misses

    Misses("0" * 64, made_by="a test").save(folder / "misses.json")
    return folder


def check(command: str, line: str, expected_code: tuple[int, ...] = (1, 2)) -> str:
    """Run a wrong command line in the current folder; its one line of output."""
    before = sorted(path for path in Path().rglob("*"))
    result = CliRunner().invoke(app, [*command.split(), *shlex.split(line)])
    assert result.exit_code in expected_code, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    told = result.stderr.splitlines()
    assert len(told) == 1, result.stderr
    assert told[0].startswith("error: ")
    assert len(told[0]) > len("error: "), "the line says nothing"
    assert "Traceback" not in result.output
    assert sorted(path for path in Path().rglob("*")) == before
    return told[0]


@pytest.mark.parametrize(("command", "line"), CASES, ids=lambda text: text or "nothing")
def test_a_wrong_use_is_one_line(
    command: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined(deep: bool) -> list[Finding]:
        raise AssertionError("the machine is examined")

    def begun(*_: object) -> int:
        raise AssertionError("the demo has begun")

    monkeypatch.setattr("gpu_align.tools.doctor.examine", examined)
    monkeypatch.setattr("vllm_integration.demo.run.run_demo", begun)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.fspath(folder.parent))
    monkeypatch.chdir(folder)
    if "tekken" in line:
        pytest.importorskip("mistral_common")
    check(command, line)


@pytest.mark.parametrize("command", WRONG)
def test_there_are_twenty_of_each(command: str) -> None:
    assert len(set(cases_of(command))) >= 20, len(set(cases_of(command)))


@pytest.mark.parametrize(
    "line", ["simulat", "recipes lern", "recipes nothing", "--bogus", "''", "Doctor", "-k 3"]
)
def test_a_command_that_there_is_not(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = check("", line)
    if line == "simulat":
        assert "Did you mean 'simulate'?" in told
