"""What an agent writes: the new file of an edit in the form of each case, drafted without and with views.

``python -m benchmarks.quality.forms`` makes the records of each case from the real edits of a corpus, as text, and
replays them as ``gpu-align simulate -k 32`` does, without and with ``--views``.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.quality.runs import make_corpora, read_entries
from benchmarks.tables import command, table
from gpu_align import simulate

K = 32
POLICIES = ("gpu_align", "prompt_lookup")
#: A case's name → prompt, prediction and output of the old and the new file.
Case = Callable[[str, str], tuple[str, str, str]]


def tool_call(new: str, path: str = "src/module.py") -> str:
    """The new file as an argument of a call in Hermes' format."""
    call = {"name": "write_file", "arguments": {"path": path, "content": new}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def told(result: str) -> str:
    """A conversation whose last message is the result of a tool."""
    ask = "<|im_start|>user\nUpgrade this module to the new release.<|im_end|>\n"
    return f"{ask}<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def asked(old: str) -> str:
    """A message with the file in a fence."""
    return f"<|im_start|>user\nUpgrade this module.\n```python\n{old}```<|im_end|>\n<|im_start|>assistant\n"


def numbered(old: str) -> str:
    """As ``cat -n`` prints it."""
    return "".join(f"{n:6}\t{line}" for n, line in enumerate(old.splitlines(keepends=True), 1))


def diff(old: str, new: str) -> str:
    """As ``diff -u`` prints it."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, "a/module.py", "b/module.py"))


#: A conversation in which the tool was called before, for another file.
CALLED = (
    f"<|im_start|>assistant\n{tool_call('import module', 'tests/test_module.py')}<|im_end|>\n{told('done')}"
)
CASES: dict[str, Case] = {
    "prediction → tool call": lambda old, new: ("", old, tool_call(new)),
    "prediction → second tool call": lambda old, new: (CALLED, old, tool_call(new)),
    "tool result → tool call": lambda old, new: (told(old), "", tool_call(new)),
    "numbered → raw": lambda old, new: (told(numbered(old)), "", new),
    "numbered → tool call": lambda old, new: (told(numbered(old)), "", tool_call(new)),
    "fence → diff": lambda old, new: (asked(old), "", diff(old, new)),
    "fence → raw": lambda old, new: (asked(old), "", new),
    "prediction → raw": lambda old, new: ("", old, new),
}


def write_records(case: Case, edits: list[tuple[str, str, str]], path: Path) -> None:
    """A record an edit: id, old and new text."""
    with path.open("w", encoding="utf-8") as lines:
        for name, old, new in edits:
            prompt, prediction, output = case(old, new)
            texts = {"prompt_text": prompt, "prediction_text": prediction, "output_text": output}
            lines.write(json.dumps({"id": name, "tokenizer": "tekken", **texts}) + "\n")


def measure(path: Path) -> dict[str, list[simulate.PolicyResult]]:
    """Policy → what it does on these records, without and with views."""
    found: dict[str, list[simulate.PolicyResult]] = {name: [] for name in POLICIES}
    for with_views in (False, True):
        records = simulate.read_records(path, with_views=with_views)
        for result in simulate.simulate(records, simulate.make_policies(POLICIES, records, K), K):
            found[result.name].append(result)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command("benchmarks.quality.forms", __doc__)
    parser.add_argument("--set", default="five", help="of benchmarks.corpus, what is held out (five)")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="measure every Nth edit")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the records there")
    arguments = parser.parse_args(argv)
    corpus = Path(f".cache/{arguments.set}.jsonl.gz")
    if code := make_corpora({arguments.set: corpus}):
        return code
    real = [e.record for e in read_entries(corpus) if e.kind == e.text and e.tokens == "tekken"]
    token_bytes = simulate.load_tokenizer("tekken").token_bytes
    edits = []
    for record in real[:: arguments.one_in]:
        old, new = (b"".join(map(token_bytes, ids)).decode() for ids in (record.prediction, record.output))
        edits.append((record.id, old, new))
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, case) in enumerate(CASES.items()):
            write_records(case, edits, path := folder / f"forms-{number}.jsonl")
            for policy, results in measure(path).items():
                rates = [f"{r.tokens_per_step:.2f} @ {r.rejected_per_accepted or 0:.2f}" for r in results]
                rows.append((name, policy, *rates))
    print(table(("case", "policy", "today", "with views"), rows, "llrr"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
