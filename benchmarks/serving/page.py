"""What the serving model found, as tables: on the terminal, and between the markers of two pages of docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.serving.step_cost import GPUS, MODELS, SETUPS, Roofline

#: Batches of the tables; the JSON has all.
COLUMNS = (1, 8, 64, 256, 1024)


def compact(results: dict[str, Any]) -> str:
    """JSON with one list a line, so that a change reads as a diff."""
    text = json.dumps(results, indent=1)
    return (
        re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text) + "\n"
    )


def _numbers(
    results: dict[str, Any], row: list[float], fits: list[bool] | None = None, digits: int = 2
) -> list[str]:
    at = [results["batches"].index(b) for b in COLUMNS if b in results["batches"]]
    return [f"{row[i]:.{digits}f}" + ("" if fits is None or fits[i] else " ×") for i in at]


def _compared(results: dict[str, Any]) -> list[tuple[str, str]]:
    """(rule, what it is), for the tables."""
    rule, constant = results["recommended"]["rule"], results["recommended"]["constant"]
    largest = max(int(name.split()[1]) for name in results["rules"] if re.fullmatch(r"fixed \d+", name))
    listed = [
        (f"fixed {largest}", f"{largest} slots for every request, as vLLM schedules"),
        ("lengths", "every draft proposed"),
        ("plugin", "the plugin's default, synchronous scheduling"),
        ("plugin, late by 1", "the plugin's default, asynchronous scheduling"),
        ("plugin, late by 2", "the same, if drafts are told yet a step later"),
        (
            "plugin, late by 1, all new",
            "asynchronous; all requests of the batch begin at once: first 120 steps",
        ),
        ("plugin, without credit", "synchronous, without what it learns of each request"),
        ("plugin, late by 1, without credit", "asynchronous, without what it learns of each request"),
        (constant, "the best constant budget that never loses"),
        (rule, "the rule alone: recommended, with credit beside it"),
        ("known curve", "upper bound: knows the step-time curve"),
    ]
    return [(name, says) for name, says in listed if name in results["rules"]]


def speedups(results: dict[str, Any], mix: str, setup: str | None, digits: int = 2) -> str:
    """Rules down, batches across: the speed-up over no drafts on one setup, or the worst of all setups."""
    columns = [b for b in COLUMNS if b in results["batches"]]
    lines = [
        "| rule | " + " | ".join(f"{b:,}" for b in columns) + " | |",
        "|---|" + "--:|" * len(columns) + "---|",
    ]
    for name, says in _compared(results):
        row = results["rules"][name][mix]
        cells = (
            _numbers(results, row["worst"], digits=digits)
            if setup is None
            else _numbers(results, row["shown"][setup], results["fits"][setup])
        )
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {says} |")
    return "\n".join(lines)


#: What the first table shows: the rule as the schedulers run it, asynchronously as vLLM does by default.
SHOWN_RULE = "plugin, late by 1"


def gains(results: dict[str, Any]) -> str:
    """The plugin's default on every shown setup, in asynchronous scheduling."""
    columns = [b for b in COLUMNS if b in results["batches"]]
    lines = [
        "| setup | predictions | " + " | ".join(f"{b:,}" for b in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for setup, fits in results["fits"].items():
        for mix in ("edit", "third", "unrelated", "rejected"):
            cells = _numbers(results, results["rules"][SHOWN_RULE][mix]["shown"][setup], fits)
            lines.append(f"| {setup if mix == 'edit' else ''} | {mix} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def budgets(results: dict[str, Any]) -> str:
    """Every budget: what it gains by edits, and its worst case by useless predictions."""
    lines = [
        "| rule | gain, edit | gain, third | worst, unrelated | worst, rejected |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, row in results["rules"].items():
        if name in ("none", "known curve"):
            continue
        marks = "**" if name == results["recommended"]["rule"] else ""
        lines.append(
            f"| {marks}`{name}`{marks} | {row['edit']['gain']:.2f} | {row['third']['gain']:.2f} | "
            f"{min(row['unrelated']['worst']):.2f} | {min(row['rejected']['worst']):.2f} |"
        )
    return "\n".join(lines)


def assumptions(results: dict[str, Any]) -> str:
    """Every number that the step times rest on."""
    model = Roofline(GPUS["H100"], MODELS["8B"], "bf16", 1)
    lines = [
        "| GPU | TB/s | bf16 TFLOP/s | fp8 TFLOP/s | GB | NVLink GB/s | source |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for g in GPUS.values():
        lines.append(
            f"| {g.name} | {g.bandwidth / 1e12:g} | {g.bf16 / 1e12:g} | {g.fp8 / 1e12:g} | {g.memory / 1e9:g} "
            f"| {g.link / 1e9:g} | {g.source} |"
        )
    lines += ["", "| model | parameters | layers | hidden | heads, KV heads, width | vocabulary | source |"]
    lines += ["|---|--:|--:|--:|--:|--:|---|"]
    for m in MODELS.values():
        lines.append(
            f"| {m.name} | {m.params / 1e9:g} B, {m.embedding / 1e9:g} B of them looked up | {m.layers} "
            f"| {m.hidden:,} | {m.q_heads}, {m.kv_heads}, {m.head_dim} | {m.vocab:,} | {m.source} |"
        )
    lines += ["", "| our assumption | value |", "|---|--:|"]
    shown = (
        "bandwidth_share",
        "compute_share",
        "softness",
        "overhead_ms",
        "logits_bytes",
        "exchange_us",
        "memory_share",
    )
    known = {f.name for f in fields(model)}
    lines += [f"| `{name}` | {getattr(model, name):g} |" for name in shown if name in known]
    lines += [
        f"| `drafter_us`: the drafter's time a step, paid by every rule that drafts | {results['drafter_us']:g} |"
    ]
    setups = "; ".join(f"{n} × {g} {m} {d}" if n > 1 else f"{g} {m} {d}" for g, m, d, n in SETUPS)
    contexts = sorted(
        {int(s.rsplit(" ", 1)[1].replace(",", "")) for s in results["setups"] if "context" in s}
    )
    lines += [
        "",
        f"Setups: {setups}; each at {', '.join(f'{c:,}' for c in contexts)} tokens of context a request.",
    ]
    lines += [
        "",
        (
            f"Traced: {results['records']} records, {results['positions']:,} positions, at most "
            f"{results['num_draft_tokens']} drafts a request and step."
        ),
    ]
    return "\n".join(lines)


def one_setup(results: dict[str, Any]) -> str:
    """Edits on the first of the shown setups."""
    return speedups(results, "edit", next(iter(results["fits"])))


def worst_setup(results: dict[str, Any]) -> str:
    """Useless predictions on the worst of all setups."""
    return speedups(results, "unrelated", None)


def attacked(results: dict[str, Any]) -> str:
    """Every draft rejected, on the worst of all setups."""
    return speedups(results, "rejected", None, digits=3)


#: Marker → the block that stands there.
BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gains": gains,
    "edit": one_setup,
    "unrelated": worst_setup,
    "rejected": attacked,
    "budgets": budgets,
    "assumptions": assumptions,
}


def fill(pages: Sequence[str], results: dict[str, Any]) -> list[str]:
    """`pages` with each block between its ``<!-- serving:NAME -->`` and ``<!-- serving:end -->``, on one of them.

    Raises:
        ValueError: a block has no place, or more than one.
    """
    filled = list(pages)
    for name, block in BLOCKS.items():
        begin = f"<!-- serving:{name} -->\n"
        pattern = re.escape(begin) + r".*?(?=<!-- serving:end -->)"
        places = [
            (i, m.span()) for i, page in enumerate(filled) for m in re.finditer(pattern, page, re.DOTALL)
        ]
        if len(places) != 1:
            raise ValueError(f"page: expected {begin.strip()} … <!-- serving:end --> once")
        [(i, (start, stop))] = places
        filled[i] = f"{filled[i][:start]}{begin}{block(results)}\n{filled[i][stop:]}"
    return filled


def fill_files(paths: Sequence[Path], results: dict[str, Any]) -> None:
    """The same for files. None is written if a block has no place."""
    filled = fill([path.read_text(encoding="utf-8") for path in paths], results)
    for path, text in zip(paths, filled, strict=True):
        path.write_text(text, encoding="utf-8")


def text(results: dict[str, Any]) -> str:
    """What the command prints."""
    setup = next(iter(results["fits"]))
    return "\n\n".join(
        [
            f"Speed-up over no drafts, {setup}, edits (×: does not fit in memory)",
            speedups(results, "edit", setup),
            "Useless predictions, the worst of all setups",
            speedups(results, "unrelated", None),
            "Every draft rejected, the worst of all setups",
            attacked(results),
            "Means over all setups and batches; worst cases",
            budgets(results),
            "Recommended: {rule}; as a constant budget: {constant}".format(**results["recommended"]),
        ]
    )
