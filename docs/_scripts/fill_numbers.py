"""Puts measured numbers into README.md and the pages of docs, so that nobody types one.

::

    python -m benchmarks.quality --json OUT.json
    python docs/_scripts/fill_numbers.py OUT.json

keeps OUT.json as docs/quality.json and rewrites the blocks between the markers of each page from it. Without an
argument it rewrites the blocks from docs/quality.json as it is. The table of the ablation is made from
docs/ablation.json, which ``python -m benchmarks.quality.ablation --json docs/ablation.json`` writes, that of a
better choice from docs/headroom.json, which ``benchmarks.quality.headroom --json`` writes, that of the latency
model from benchmarks/results/latency.json, the file of ``benchmarks.speed.latency_model --write``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
NUMBERS = DOCS / "quality.json"
ABLATION = DOCS / "ablation.json"
HEADROOM = DOCS / "headroom.json"
LATENCY = DOCS.parent / "benchmarks" / "results" / "latency.json"
#: Clock of the latency model, in GHz.
GIGAHERTZ = 1.755
#: Name of the block in ``<!-- NAME:begin -->``.
MAIN_BLOCK = "numbers"
OURS = "gpu_align"
#: K of the tables.
K = 64
#: The peer of the table by kind.
NAMED_PEER = "suffix_decoding_4_deep"

#: The rows of the table in docs/quality.md, and what they are.
REMARKS = {
    "gpu_align": "this library, default settings",
    "suffix_decoding_4_deep": "Arctic's suffix decoding, spec factor 4, tree of depth 128",
    "suffix_decoding_deep": "Arctic's suffix decoding, spec factor 1, tree of depth 128",
    "prompt_lookup": "n-gram of 2–5 tokens, latest match",
    "prompt_lookup_vllm": "n-gram as vLLM's V1 runner looks it up",
    "prompt_lookup_vllm_v2": "n-gram as vLLM's V2 runner looks it up",
    "prompt_lookup_transformers": "prompt lookup as in transformers",
    "myers": "streaming Myers diff of tokens",
    "static_text": "Cascade's: cursor, and LCS of lines at completed lines",
    "openai": "OpenAI's, reverse-engineered: resumes after 32 equal tokens",
    "input_lookup_node_llama_cpp": "input lookup as in node-llama-cpp",
    "cursor": "stops at the first mismatch",
}
#: The rows of README.md: ours, the best peer, what vLLM has, and the two services.
FRONT_PAGE = ("gpu_align", "suffix_decoding_4_deep", "prompt_lookup_vllm_v2", "static_text", "openai")
#: In docs/developer/quality-checks.md alone.
MORE_REMARKS = {
    "suffix_decoding": "Arctic's suffix decoding, spec factor 1",
    "suffix_decoding_2": "spec factor 2",
    "suffix_decoding_4": "spec factor 4",
    "suffix_decoding_16": "spec factor 16",
    "suffix_decoding_2_deep": "spec factor 2, tree of depth 128",
    "suffix_decoding_16_deep": "spec factor 16, tree of depth 128",
    "suffix_decoding_deep_cached": "spec factor 1, depth 128, and the tuning split as earlier responses",
    "suffix_decoding_4_deep_cached": "spec factor 4, depth 128, and the tuning split as earlier responses",
    "recipe_pack": "the shipped recipes alone: no prediction, no own output",
    "suffix_decoding_vllm": "spec factor 1, tree of depth 24, as vLLM has it by default",
    "prompt_lookup_vllm_2_5": "n-gram as vLLM's V1 runner looks it up, window 2–5",
    "prompt_lookup_vllm_1_3": "as vLLM's V1 runner looks it up, window 1–3",
    "prompt_lookup_vllm_v2_1_3": "as vLLM's V2 runner looks it up, window 1–3",
    "clairvoyant": "bound: best continuation anywhere in prediction or output",
    "perfect_chooser": "a perfect choice among the drafter's own candidates, each copied plainly",
}


def _ratios(counts: dict[str, int]) -> tuple[str, str]:
    per_step = f"{counts['output_tokens'] / counts['steps']:.2f}" if counts["steps"] else "–"
    return per_step, f"{counts['rejected'] / counts['accepted']:.2f}" if counts["accepted"] else "–"


def _runs(numbers: dict[str, Any], num_draft_tokens: int = K) -> list[dict[str, Any]]:
    return [run for run in numbers["runs"] if run["num_draft_tokens"] == num_draft_tokens]


def table(numbers: dict[str, Any], rows: Collection[str] = REMARKS, told: bool = False) -> str:
    """The block of docs/quality.md: the five packages, default settings; with `told`, what each policy is."""
    shown, short = (
        {run["policy"]: run["five"] for run in _runs(numbers, size) if not run["setting"]}
        for size in (K, K // 2)
    )
    names = sorted(set(rows) & shown.keys(), key=lambda name: (shown[name]["steps"], name))
    sizes = " | ".join(f"K = {size}: tokens a step | rejected per accepted" for size in (K, K // 2))
    lines = [f"| policy | {sizes} |", "|---|--:|--:|--:|--:|"]
    for name in names:
        strong = "**" if name == OURS else ""
        cells = [*_ratios(shown[name]), *(_ratios(short[name]) if name in short else ("", ""))]
        cells = [f"{strong}{cell}{strong}" if cell else "" for cell in cells]
        label = REMARKS[name] if told else f"`{name}`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    first = shown[names[0]]
    note = (
        f"{first['records']} outputs, {first['output_tokens']:,} tokens, at most K drafts a "
        "step, the prefill counted as a step without drafts."
    )
    if not short.keys() >= set(names):
        note += f" What has no figure at K = {K // 2} was not run there."
    return "\n".join([*lines, "", note])


def front_page(numbers: dict[str, Any]) -> str:
    """The block of README.md: some rows of `table`."""
    return table(numbers, FRONT_PAGE, told=True)


def by_num_draft_tokens(numbers: dict[str, Any]) -> str:
    """Ours and the best peer at equal cost, for each K, on the five packages."""
    peers = {
        OURS: "gpu_align",
        "suffix_decoding_4_deep": "suffix decoding",
        "prompt_lookup_vllm": "vLLM's n-gram",
    }
    sizes = sorted({run["num_draft_tokens"] for run in numbers["runs"]})
    rows = [f"| K | {' | '.join(peers.values())} |", "|--:|" + "--:|" * len(peers)]
    for size in sizes:
        found = {run["policy"]: run["five"] for run in _runs(numbers, size) if not run["setting"]}
        rows.append(f"| {size} | {' | '.join(' @ '.join(_ratios(found[name])) for name in peers)} |")
    return "\n".join([*rows, "", "Tokens a step @ rejected per accepted."])


def everything(numbers: dict[str, Any]) -> str:
    """Every drafter with every setting on the test split and on the five packages, at each K."""
    sizes = sorted({run["num_draft_tokens"] for run in numbers["runs"]}, reverse=True)
    parts = []
    for size in sizes:
        runs = sorted(_runs(numbers, size), key=lambda run: run["test"]["steps"])
        rows = [
            f"**Up to {size} drafts a step**: tokens a step, rejected per accepted",
            "",
            "| drafter | test split | | five packages | | |",
            "|---|--:|--:|--:|--:|---|",
        ]
        for run in runs:
            name = f"`{run['policy']}`"
            remark = {**REMARKS, **MORE_REMARKS}.get(run["policy"], "")
            if run["setting"]:
                remark = ", ".join(f"`{field}={value}`" for field, value in run["setting"].items())
            rows.append(
                f"| {name} | {' | '.join((*_ratios(run['test']), *_ratios(run['five'])))} | {remark} |"
            )
        parts.append("\n".join(rows))
    test, five = (numbers["runs"][0][group] for group in ("test", "five"))
    parts.append(
        f"Test split: {test['records']} outputs, {test['output_tokens']:,} tokens. Five packages: "
        f"{five['records']} outputs, {five['output_tokens']:,} tokens."
    )
    return "\n\n".join(parts)


def rows(numbers: dict[str, Any]) -> str:
    """Kinds of text and qualities of the prediction: ours, a peer, and the least lead over any peer at K = 64."""
    names = f"records | `{OURS}` | `{NAMED_PEER}` | lead over it | least lead over any peer"
    found = [
        f"| | {names} | confidence off | chance |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for label, row in numbers["rows"].items():
        leads = [lead for lead in row["leads"] if lead["num_draft_tokens"] == K]
        [named] = [lead for lead in leads if lead["peer"] == NAMED_PEER]
        least = leads[0]
        ours, peer = (" at ".join(_ratios(row["runs"][name])) for name in (OURS, NAMED_PEER))
        found.append(
            f"| {label} | {row['runs'][OURS]['records']} | {ours} | {peer} | {_lead(named)} "
            f"| {_lead(least)} over `{least['peer']}` | {row['gap']:.3f} "
            f"| {row['chance_gap']:.3f} |"
        )
    return "\n".join(found)


def _lead(lead: dict[str, Any]) -> str:
    return "no setting" if lead["ratio"] is None else f"{lead['ratio'] - 1:+.1%}".replace("-", "−")


def confidence(numbers: dict[str, Any]) -> str:
    """The reliability of our confidence, a row a decile that holds drafts."""
    drafts = sum(decile["drafts"] for decile in numbers["reliability"])
    rows = ["| confidence | share of drafts | promised | accepted |", "|---|--:|--:|--:|"]
    for decile in numbers["reliability"]:
        if decile["drafts"]:
            low = decile["low"]
            rows.append(
                f"| {low:.1f}–{low + 0.1:.1f} | {decile['drafts'] / drafts:.1%} | {decile['confidence']:.3f} "
                f"| {decile['accepted']:.3f} |"
            )
    return "\n".join([*rows, "", f"{drafts:,} drafts were put to the test."])


def checks(numbers: dict[str, Any]) -> str:
    """What has to hold, and whether it does."""
    rows = ["| check | found | wanted | |", "|---|---|---|---|"]
    for check in numbers["checks"]:
        verdict = "holds" if check["passed"] else "**does not hold**"
        cells = (str(check[field]).replace("|", "\\|") for field in ("name", "value", "wanted"))
        rows.append(f"| {' | '.join(cells)} | {verdict} |")
    return "\n".join(rows)


def ablation(numbers: dict[str, Any]) -> str:
    """What each mechanism adds: the rows of docs/ablation.json, the baseline first."""
    stored = json.loads(ABLATION.read_text(encoding="utf-8"))
    rows = [
        "| without | instead | test split | five packages | code lines | perfect | unrelated |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in stored["rows"]:
        changes = (row["change"][group] for group in ("test", "five"))
        cells = ["–" if c is None else f"{c:+.1%}".replace("-", "−") for c in changes]
        if row["mechanism"] == "everything":
            default = row["settings"][0]
            cells = [" at ".join(_ratios(default[group])) for group in ("test", "five")]
        perfect, unrelated = row["perfect"], row["unrelated"]
        share = unrelated["rejected_from_prediction"] / unrelated["output_tokens"]
        cells += [str(row["lines"] or "–"), f"{perfect['least_steps']}/{perfect['records']}", f"{share:.3f}"]
        name = "nothing" if row["mechanism"] == "everything" else row["mechanism"]
        rows.append(f"| {name} | {row['instead']} | {' | '.join(cells)} |")
    first = stored["rows"][0]["settings"][0]["test"]
    every = "" if stored["one_in"] == 1 else f" (every {stored['one_in']}th of the corpus, of both splits)"
    return "\n".join([*rows, "", f"Test split: {first['records']} outputs{every}, K = {K}."])


def headroom(numbers: dict[str, Any]) -> str:
    """What a chooser that knows the output would make of our drafts and suffix decoding's: docs/headroom.json."""
    stored = json.loads(HEADROOM.read_text(encoding="utf-8"))
    names = [name for name in next(iter(stored.values())) if name not in ("records", "output_tokens")]
    ours, peer, either = names
    rows = [f"| | `{ours}` | `{peer}` | {either} | lead | at most |", "|---|--:|--:|--:|--:|--:|"]
    for label, row in stored.items():
        cells = [f"{row['output_tokens'] / row[name]:.2f}" for name in names]
        cells += [f"{row[peer] / row[name] - 1:+.1%}".replace("-", "−") for name in (ours, either)]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def latency(numbers: dict[str, Any]) -> str:
    """Cycles by the latency model as µs, and the throughput of the LCS, for sm_90 by Triton version."""
    tables = json.loads(LATENCY.read_text(encoding="utf-8"))["triton"]
    versions = sorted(tables, reverse=True)
    rows = [
        f"| sm_90, warm / cold | {' | '.join(f'Triton {version}' for version in versions)} |",
        "|---|" + "--:|" * len(versions),
    ]
    for label in tables[versions[0]]:
        found = [tables[version][label]["sm_90"] for version in versions]
        if label.startswith("lcs_length"):
            cells = [f"{row['tcups_batch'] * GIGAHERTZ:.1f} TCUPS" for row in found]
        else:
            cells = [f"{_us(row['warm'])} / {_us(row['cold'])} µs" for row in found]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _us(cycles: float) -> str:
    us = cycles / GIGAHERTZ / 1e3
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


#: Page → its blocks by name.
Blocks = dict[str, Callable[[dict[str, Any]], str]]
PAGES: dict[Path, Blocks] = {
    DOCS.parent / "README.md": {MAIN_BLOCK: front_page},
    DOCS / "tuning.md": {"choose-k": by_num_draft_tokens},
    DOCS / "developer" / "compiled-kernels.md": {"latency": latency},
    DOCS / "quality.md": {MAIN_BLOCK: table, "rows": rows, "confidence": confidence},
    DOCS / "developer" / "mechanisms.md": {"ablation": ablation},
    DOCS / "developer" / "quality-checks.md": {
        "checks": checks,
        "headroom": headroom,
        "everything": everything,
    },
}


def fill(page: str, block: str, name: str = MAIN_BLOCK) -> str:
    """`page` with `block` between its markers of this name.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    begin_mark, end_mark = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = page.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end) or begin_mark in after or end_mark in before + after:
        raise ValueError(f"page: expected {begin_mark} and {end_mark} once each, in this order")
    return f"{before}{begin_mark}\n{block}\n{end_mark}{after}"


def filled(page: Path, numbers: dict[str, Any]) -> str:
    """The text of one of `PAGES` with all its blocks made anew."""
    text = page.read_text(encoding="utf-8")
    for name, block in PAGES[page].items():
        text = fill(text, block(numbers), name)
    return text


def main(arguments: list[str]) -> None:
    if arguments:
        numbers = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(filled(page, numbers), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
