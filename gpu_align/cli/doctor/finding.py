"""What an examination finds, and the verdict on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: the thing that was examined.
        found: what was found, in words.
        ok: True: works; False: drafting does not work because of it; None: says nothing about drafting.
        fix: the command that mends it; of a finding that is not False, what would be better.
        detail: shown with ``-v`` only.
    """

    what: str
    found: str
    ok: bool | None = None
    fix: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Verdict:
    """The last lines of the report.

    Attributes:
        usable: whether drafting works here.
        line: the verdict in one line.
        problems: the findings that are False, without details.
        advice: findings that are not False and name a command.
    """

    usable: bool
    line: str
    problems: tuple[Finding, ...]
    advice: tuple[Finding, ...]


def verdict(findings: Sequence[Finding]) -> Verdict:
    """Drafting works here if no finding has ``ok is False``."""
    failed = tuple(finding for finding in findings if finding.ok is False)
    problems = tuple(finding for finding in failed if not finding.detail) or failed
    advice = tuple(finding for finding in findings if finding.ok is not False and finding.fix)
    if problems:
        line = f"not usable: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    elif any(finding.what == "model runner" for finding in findings):
        line = "usable: vLLM drafts from predictions here"
    else:
        line = "usable: the library drafts here"
    return Verdict(not problems, line, problems, advice)
