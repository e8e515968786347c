"""Wrong uses of every command: one line on stderr, a non-zero exit code, no traceback, and no file written.

Each line of `WRONG` is a command line in a folder with the files of `odd`.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
from gpu_align.tools.doctor import Finding
from tests.gpu_align.cli.test_commands import folder
from tests.modules import command as run

__all__ = ["folder"]  # the fixture

#: Wrong after every command.
ALWAYS = ("--no-such-option", "--help=3")

#: In a line, one of these after the other.
EACH = {
    "{file}": ("missing.jsonl", "folder", "empty.jsonl", "words.jsonl", "binary.bin", "broken.gz", "old.py"),
    "{json}": ("no/folder/out.json", "folder.json"),
    "{tokenizer}": ("/no/such/folder", "''", "folder"),
    "{tekken}": ("--tokenizer tekken",),
    "{here}": ("--base-url http://127.0.0.1:9/v1",),
}

#: Command lines, and behind an arrow what the one line says.
WRONG: dict[str, str] = {
    "": """
        simulat → Did you mean 'simulate'?
        recipes lern
        recipes nothing
        ''
        Doctor
        -k 3
    """,
    "simulate": """

        loop
        {file}
        --before old.py --after old.py --views → --views: expected with a file PAIRS only
        pairs.jsonl --policy curser → --policy: expected cursor, or module:Class, found 'curser'
        pairs.jsonl --policy nobody → --policy: expected one of gpu_align,
        pairs.jsonl --policy no_such_module:Class → cannot import 'no_such_module'
        pairs.jsonl --policy gpu_align.predictors:Nothing → expected a class or a function
        pairs.jsonl --policy gpu_align.tools.policies:OpenAI?x=1 → unexpected keyword argument 'x'
        pairs.jsonl --policy gpu_align.tools.policies:OpenAI?lookahead → bad query
        pairs.jsonl --policy builtins:dict → expected a TokenPredictor, found dict
        pairs.jsonl --policy recipe_pack → 'recipe_pack': drafts from recipes
        pairs.jsonl {tekken} --policy recipe_pack --recipes off → they are off
        pairs.jsonl --recipes words.jsonl → do not all name one tokenizer
        pairs.jsonl {tekken} --recipes words.jsonl --policy gpu_align → words.jsonl: expected a recipe pack
        pairs.jsonl {tekken} --recipes missing --policy gpu_align → No such file
        pairs.jsonl --length-factor -1 → --length-factor: expected
        pairs.jsonl --min-survival 1.5 → --min-survival: expected
        pairs.jsonl --tokenizer {tokenizer}
        pairs.jsonl --json {json} → --json:
        pairs.jsonl --json pairs.jsonl → pairs.jsonl is also the input
        pairs.jsonl --json out --html out → --html: out is also the file of --json
        --before old.py → --before: expected --after as well
        --after old.py → --after: expected with --before only
        pairs.jsonl --before old.py --after old.py → found a file PAIRS and --before
        --before binary.bin --after old.py
        --before old.py --after old.py --json old.py
        --git HEAD~1.. --repo folder → --git: not a git repository
        pairs.jsonl --repo folder → --repo: expected with --git only
        pairs.jsonl --suffix .py → --suffix: expected with --git only
        pairs.jsonl --limit 3 → --limit: expected with --git only
    """,
    "policies": """
        nobody
        ''
    """,
    "recipes learn": """

        old.py
        -o out.json missing.py → no such file or folder
        -o out.json folder → expected texts to learn from, found none
        -o out.json old.py
    """,
    "recipes observe": """

        {file} --out out.json {tekken}
        samples.jsonl --out out.txt {tekken}
        text.json --out text.json {tekken}
        samples.jsonl --out out.json --tokenizer {tokenizer}
        samples.jsonl --out out.json {tekken} --agree 0
    """,
    "recipes merge": """

        one.json.gz missing.json --out out.json
        {file} --out out.json
        one.json.gz --out out.txt
        one.json.gz --out one.json.gz
    """,
    "recipes report": """

        one.json.gz outputs.jsonl
        {file} outputs.jsonl {tekken}
        one.json.gz {file} {tekken}
        one.json.gz outputs.jsonl --tokenizer {tokenizer}
        one.json.gz outputs.jsonl {tekken} --json outputs.jsonl
    """,
    "recipes show": """

        {file}
        text.json
        one.json.gz --tokenizer /no/such/folder
    """,
    "tune": """

        pairs.jsonl -o out.yaml → --out: expected a name that ends in .json
        pairs.jsonl -o out.json → at least 8 requests
        pairs.jsonl missing.jsonl -o out.json → missing.jsonl: no such file or folder
        {file} -o out.json
        pairs.jsonl -o {json}
        pairs.jsonl -o pairs.jsonl
    """,
    "report": """

        loop
        deep.yaml
        binary.bin → expected UTF-8 text
        words.jsonl → error: words.jsonl: expected an object
        {file}
        logs/chatcmpl-1.yaml --html logs/chatcmpl-1.yaml → is also the input
        logs --html logs
        logs --tokenizer tekken → --tokenizer: expected with a file only, found a folder
        logs/chatcmpl-1.yaml --top 3 → --top: expected with a folder only, found the file
        ''
    """,
    "demo": f"""
        --model /no/such/folder → expected a model as its folder or its Hugging Face name, found '/no/such/folder'
        --model folder → the model folder is a folder without a config.json
        --model https://huggingface.co/a/b
        --model {"x" * 300} → File name too long
        --out {"x" * 300} → File name too long
        --out old.py → old.py: File exists
    """,
    "bench": """
         → found neither
        {here} --serve m → expected one of --base-url, --serve, found --base-url and --serve
        --base-url http://localhost:8000 → expected a URL that ends in /v1
        --base-url localhost/v1 → found 'localhost/v1'
        {here} → no answer
        {here} --concurrency 0 → --concurrency: expected numbers from 1 to 4096 as in 1,8,32, found '0'
        {here} --modes none,fast → context,conversation,plain,ngram, found 'fast'
        {here} --modes ngram → ngram needs --compare-url
        {here} --compare-url http://127.0.0.1:9/v1 --modes none → is for the modes ngram and plain
        {here} --modes none,plain → plain needs --compare-url
        {here} missing.jsonl → missing.jsonl: No such file
        {here} a --before b → found a file PAIRS and --before
        {here} --git HEAD --repo missing → --git: cannot change to 'missing'
        {here} --prediction best → --prediction: expected auto, before or output, found 'best'
        {here} --json a --html a → --html: a is also the file of --json
        {here} --vllm-args x → --vllm-args: expected with --serve only
        {here} --together → --together: expected with --serve only
        --serve ' ' → --serve: expected a model's name or folder, found ' '
        --serve m --compare-url http://127.0.0.1:9/v1 → --compare-url:
        --serve m --vllm-args "'" → --vllm-args: No closing quotation
    """,
    "doctor": """
        --json {json}
        --base-url http://127.0.0.1:9
    """,
}  # fmt: skip


def expanded(line: str) -> list[str]:
    for name, values in EACH.items():
        if name in line:
            return [row for value in values for row in expanded(line.replace(name, value, 1))]
    return [line]


CASES = [
    (command, *(row.strip() for row in f"{line}→".split("→")[:2]))
    for command, lines in WRONG.items()
    for rows in (*lines.split("\n")[1:-1], *ALWAYS)
    for line in expanded(rows)
]


@pytest.fixture(scope="module")
def odd(folder: Path) -> Path:
    """The folder of the examples, and what some of the command lines above find beside it."""
    texts = {
        "text.jsonl": json.dumps({"id": "a", "prediction_text": "a b", "output_text": "a c"}),
        "words.jsonl": "not JSON",
        "list.jsonl": "[1, 2]",
        "empty.jsonl": "",
        "text.json": '"text"',
        "deep.yaml": "[" * 30_000,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "loop").symlink_to("loop")
    (folder / "binary.bin").write_bytes(b"\xff\xfe\x00\x01" * 8)
    (folder / "broken.gz").write_bytes(gzip.compress(b"{}\n" * 100)[:-12])
    (folder / "folder").mkdir()
    (folder / "folder.json").mkdir()
    return folder


def check(command: str, line: str) -> str:
    """Run a wrong command line in the current folder; its one line of output."""
    before = sorted(path for path in Path().rglob("*"))
    result = run(*command.split(), *shlex.split(line))
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    told = result.stderr.splitlines()
    assert len(told) == 1, result.stderr
    assert told[0].startswith("error: ")
    assert len(told[0]) > len("error: "), "the line says nothing"
    assert "Traceback" not in result.output
    assert sorted(path for path in Path().rglob("*")) == before
    return told[0]


@pytest.mark.parametrize(("command", "line", "words"), CASES, ids=[" ".join(case[:2]) for case in CASES])
def test_a_wrong_use_is_one_line(
    command: str, line: str, words: str, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined(deep: bool) -> list[Finding]:
        raise AssertionError("the machine is examined")

    def begun(*_: object) -> int:
        raise AssertionError("the demo has begun")

    monkeypatch.setattr("gpu_align.tools.doctor.examine", examined)
    monkeypatch.setattr("vllm_integration.demo.run.run_demo", begun)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.fspath(odd.parent))
    monkeypatch.chdir(odd)
    if "tekken" in line:
        pytest.importorskip("mistral_common")
    assert words in check(command, line)
