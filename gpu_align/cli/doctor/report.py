"""The report of `doctor` on a terminal, line by line as findings come, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from gpu_align.cli.doctor.finding import Finding, verdict

_MARKS = {True: ("ok", "green"), False: ("FAIL", "red"), None: ("", "")}


def show(findings: Iterable[Finding], console: Console, verbose: bool = False) -> list[Finding]:
    """Print each finding when it comes, then the verdict and the commands; all findings."""
    seen = []
    for finding in _with_status(findings, console):
        seen.append(finding)
        if verbose or not finding.detail:
            mark, style = _MARKS[finding.ok]
            name = f" {finding.what:17} "
            console.print(Text.assemble((f"{mark:4}", style), name, finding.found), soft_wrap=True)
    reached = verdict(seen)
    console.print(Text(f"\n{reached.line}", style="bold green" if reached.usable else "bold red"))
    for title, found in (("mend", reached.problems), ("optional", reached.advice)):
        for fix, names in _by_fix(found).items():
            told = f"  {title}: {', '.join(names)}"
            console.print(Text(f"{told}\n    {fix}" if fix else told), soft_wrap=True)
    return seen


def _with_status(findings: Iterable[Finding], console: Console) -> Iterable[Finding]:
    """The findings; on a terminal, a line below them says that the examination goes on."""
    if not console.is_terminal:
        yield from findings
        return
    with console.status("examining …"):
        yield from findings


def _by_fix(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Command → what it mends, in the order of the findings."""
    fixes: dict[str, list[str]] = {}
    for finding in findings:
        fixes.setdefault(finding.fix, []).append(finding.what)
    return fixes


def as_json(findings: Iterable[Finding], version: str) -> dict[str, Any]:
    """``{"version", "usable", "verdict", "fixes": [command], "findings": [{what, found, ok, fix, detail}]}``."""
    seen = list(findings)
    reached = verdict(seen)
    return {
        "version": version,
        "usable": reached.usable,
        "verdict": reached.line,
        "fixes": [fix for fix in _by_fix(reached.problems) if fix],
        "findings": [asdict(finding) for finding in seen],
    }
