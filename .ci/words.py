"""Wording that a reader stumbles over, in packages, benchmarks and documentation: ``python .ci/words.py``.

Each pattern has a reason, which says what to write. CONTRIBUTING.md has the words that are used.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    "gpu_align",
    "vllm_integration",
    "benchmarks",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
#: Pattern → what to write instead. At most twenty.
PATTERNS = {
    r'"""(What|Who|Where) ': "begin a docstring with what it does or is: a verb or a noun",
    r"\bbehind (which|it|them|each|its|one|the (last|first|token|draft|end))\b": "after: behind is for space",
    r"\b(drafted|said|draft) behind\b": "after: behind is for space",
    r"\bWho (asks|needs|has|wants|brings)\b": "the caller, a request, a client",
    r"\b(somebody|nobody)('s)?\b": "the caller, another thread, no request",
    r"\b(that|what) is none\b": "invalid, malformed, not a …",
    r"\b0 where there is none\b|\bNone where there is none\b": "0 without one, None if it is missing",
    r"\b(hangs|hung) on\b": "depends on",
    r"\bin vain\b": "rejected, without effect",
    r"\b(verified|works?|drafts?) for nothing\b": "rejected, needlessly",
    r"\bwithout a word\b": "silently",
    r"\b(told|heard) (of it )?late\b": "arrives a step late",
    r"\banything to say\b|\bhas a say\b": "matches, counts",
    r"\b[Ww]ings?\b": "package of a process",
    r"\b(near|far) look\b": "local resync, global resync",
    r"\btake_in\b|\bklass\b|\brival\b": "update_state, class_id, runner-up",
    r"\bfor who (is|has)\b": "for requests that",
    r"\bwho asks for the same\b": "equal arguments return the same",
    r"\btell no (accepted|rejected)\b": "omit",
    r"\bresembles '": "did you mean '…'?",
}  # fmt: skip


def findings() -> list[str]:
    """``file:line: words: what to write`` of each."""
    found = []
    for place in PLACES:
        path = ROOT / place
        files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for file in files:
            text = file.read_text(encoding="utf-8")
            for pattern, instead in PATTERNS.items():
                for match in re.finditer(pattern, text):
                    line = text.count("\n", 0, match.start()) + 1
                    words = " ".join(match[0].split())
                    found.append(f"{file.relative_to(ROOT)}:{line}: {words!r}: {instead}")
    return found


if __name__ == "__main__":
    print("\n".join(all_found := findings()), end="\n" if all_found else "")
    sys.exit(bool(all_found))
