"""The documentation is correct: its code runs, its links resolve, its figures come from their source."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_align.tools.console import EXAMPLES
from tests.modules import ROOT, load

PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "RELEASING.md")]
    + list((ROOT / "docs").rglob("*.md"))
    + [
        page
        for package in ("gpu_align", "vllm_integration", "benchmarks")
        for page in (ROOT / package).rglob("README.md")
    ]
)
#: Pages about a running server: their code is compiled and not run.
SERVED = [page for page in PAGES if page.name == "vllm.md" or ROOT / "vllm_integration" in page.parents]
#: A comment above a fence whose code is compiled and not run.
NOT_RUN = re.compile(r"<!-- needs (a|an) [\w ]+ -->\s*$")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    page: Path
    line: int
    code: str
    #: what the code prints, where a ``text`` fence follows it
    prints: str | None
    runs: bool


def python_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    blocks = []
    for i, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        after = fences[i + 1] if i + 1 < len(fences) else None
        follows = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
        line = text.count("\n", 0, fence.start()) + 1
        runs = page not in SERVED and NOT_RUN.search(text[: fence.start()]) is None
        blocks.append(Block(page, line, fence[2], after[2] if after and follows else None, runs))
    return blocks


BLOCKS = [block for page in PAGES for block in python_blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{_page_id(b.page)}:{b.line}")
def test_python_in_the_docs_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile(block.code, f"{_page_id(block.page)}:{block.line}", "exec", dont_inherit=True)
    if not block.runs:
        return
    monkeypatch.chdir(tmp_path)
    record = {"id": "a", "prediction": [1, 2, 3, 4, 5], "output": [1, 2, 9, 4, 5]}
    with gzip.open("pairs.jsonl.gz", "wt") as pairs:  # what the pages call a file of records
        json.dump(record, pairs)
    script = tmp_path / "script.py"  # as a reader runs it
    script.write_text(block.code, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    if block.prints is not None:
        assert printed.getvalue() == block.prints


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as MkDocs and GitHub make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "docs" not in page.parents], ids=_page_id)
def test_links_resolve(page: Path) -> None:
    """Of pages outside of the site, whose build looks at those of its own, as at its navigation."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: no such file"
        if anchor and linked.suffix == ".md":  # a picture's "#only-dark" is for the theme
            assert anchor in _slugs(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_commands_and_extras_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = " ".join(re.findall(r"`([^`\n]+)`", text) + [fence[2] for fence in FENCE.finditer(text)])
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", project, re.MULTILINE | re.DOTALL)
    assert section is not None
    known = set(re.findall(r"^(\w+) = ", section[1], re.MULTILINE))
    for extras in re.findall(r"(?:gpu-align|\.)\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= known
    for module in re.findall(r"python -m (benchmarks(?:\.\w+)+)", text):
        assert importlib.util.find_spec(module) is not None, module


COMMAND = re.compile(r"^(?:\w+=\S+ )*gpu-align ((?:.*\\\n)*.*)$", re.MULTILINE)
LINES = [
    (_page_id(page), line)
    for page in PAGES
    for fence in FENCE.finditer(page.read_text(encoding="utf-8"))
    if fence[1] in ("bash", "console", "sh")
    for line in COMMAND.findall(fence[2])
]


@pytest.mark.parametrize(("page", "line"), [*LINES, *(("--help", line[10:]) for line in EXAMPLES)])
def test_documented_command_lines_parse(page: str, line: str) -> None:
    """Each has options that exist, with values that they take; nothing is run."""
    from typer.main import get_command

    from gpu_align.tools.cli import app

    command, words = get_command(app), shlex.split(line.replace("\\\n", " "), comments=True)
    while inner := getattr(command, "commands", None):
        command = inner[words.pop(0)]
    command.make_context("gpu-align", words)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr[-3000:]
    pages = list(site.glob("*.html"))
    assert len(pages) >= 10
    assert list(load("docs/_scripts/check_pages.py").findings(site)) == []
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\s\">]+)"
        r"|<link(?! rel=\"canonical\")[^>]+href=\"?(https?:[^\s\">]+)"
    )
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not loads.findall(text), page.name
        assert 'data-md-component="source"' not in text, f"{page.name} asks api.github.com"
