"""Put measured numbers into README.md and the pages of docs, so that none is typed.

Rewrites the blocks between the markers of `PAGES` from the files in benchmarks/results, each of which names the
command that made it. Run it after ``python -m benchmarks.quality --json benchmarks/results/quality.json``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import tables
from benchmarks.tables import DOCS, ratio

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
#: In benchmarks/quality/README.md alone.
MORE_REMARKS = {
    "suffix_decoding": "depth 64, spec factor 1",
    "suffix_decoding_2": "spec factor 2",
    "suffix_decoding_4": "spec factor 4",
    "suffix_decoding_16": "spec factor 16",
    "suffix_decoding_2_deep": "spec factor 2, depth 128",
    "suffix_decoding_16_deep": "spec factor 16, depth 128",
    "suffix_decoding_deep_cached": "and the tuning split as earlier responses",
    "suffix_decoding_4_deep_cached": "and the tuning split as earlier responses",
    "recipe_pack": "the shipped recipes alone",
    "suffix_decoding_vllm": "depth 24, vLLM's default",
    "prompt_lookup_vllm_2_5": "V1, window 2–5",
    "prompt_lookup_vllm_1_3": "V1, window 1–3",
    "prompt_lookup_vllm_v2_1_3": "V2, window 1–3",
    "clairvoyant": "bound: the best continuation anywhere",
}


def _ratios(counts: dict[str, int]) -> tuple[str, str]:
    """Tokens a step, and rejected per accepted."""
    return ratio(counts["output_tokens"], counts["steps"]), ratio(counts["rejected"], counts["accepted"])


def _defaults(numbers: dict[str, Any], num_draft_tokens: int = K) -> dict[str, dict[str, Any]]:
    """The runs of each drafter with its own settings, by policy."""
    return {
        run["policy"]: run
        for run in numbers["runs"]
        if run["num_draft_tokens"] == num_draft_tokens and not run["setting"]
    }


def table(numbers: dict[str, Any], rows: Collection[str] = REMARKS, told: bool = False) -> str:
    """The block of docs/quality.md: the five packages, default settings; with `told`, what each policy is."""
    shown, short = (
        {name: run["five"] for name, run in _defaults(numbers, size).items()} for size in (K, K // 2)
    )
    names = sorted(set(rows) & shown.keys(), key=lambda name: (shown[name]["steps"], name))
    found = []
    for name in names:
        strong = "**" if name == OURS else ""
        cells = [*_ratios(shown[name]), *(_ratios(short[name]) if name in short else ("", ""))]
        label = REMARKS[name] if told else f"`{name}`"
        found.append([label, *(f"{strong}{cell}{strong}" if cell else "" for cell in cells)])
    sizes = (f"K = {size}: tokens a step | rejected per accepted" for size in (K, K // 2))
    first = shown[names[0]]
    note = (
        f"{first['records']} outputs, {first['output_tokens']:,} tokens, at most K drafts a "
        "step, the prefill counted as a step without drafts."
    )
    if not short.keys() >= set(names):
        note += " Empty cells were not run."
    return tables.table(["policy", *sizes], found, "lrrrr") + f"\n\n{note}"


def front_page(numbers: dict[str, Any]) -> str:
    """The block of README.md: some rows of `table`."""
    return table(numbers, FRONT_PAGE, told=True)


def headline(numbers: dict[str, Any]) -> str:
    """The line under the picture of README.md: ours and vLLM's drafter at the K of the documented server."""
    found = _defaults(numbers, 32)
    ours, theirs = (_ratios(found[name]["five"])[0] for name in ("gpu_align", "prompt_lookup_vllm_v2"))
    outputs = numbers["runs"][0]["five"]["records"]
    return (
        f"**{float(ours):.1f} tokens a forward pass** on {outputs} real edits, vLLM's n-gram (V2 runner) "
        f"{float(theirs):.1f}.\n"
        "Count [yours](docs/simulator.md): `gpu-align simulate --git HEAD~20..HEAD`"
    )


def by_num_draft_tokens(numbers: dict[str, Any]) -> str:
    """Ours for each K, on the five packages."""
    sizes = sorted({run["num_draft_tokens"] for run in numbers["runs"]})
    rows = [[size, *_ratios(_defaults(numbers, size)[OURS]["five"])] for size in sizes]
    return tables.table(["K", "tokens a step", "rejected per accepted"], rows, "rrr")


def more_drafters(numbers: dict[str, Any]) -> str:
    """The rows that docs/quality.md leaves out: the peers with other settings, the recipes alone, the bounds."""
    found = _defaults(numbers)
    rows = [
        [f"`{name}`", " at ".join(_ratios(found[name]["test"])), MORE_REMARKS[name]]
        for name in sorted(MORE_REMARKS.keys() & found.keys(), key=lambda name: found[name]["test"]["steps"])
    ]
    ours = " at ".join(_ratios(found[OURS]["test"]))
    test = numbers["runs"][0]["test"]
    return tables.table(["drafter", "test split", ""], rows, "lrl") + (
        f"\n\nTokens a step at rejected per accepted, K = {K}, where `{OURS}` has {ours}: "
        f"{test['records']} outputs, {test['output_tokens']:,} tokens. "
        f"benchmarks/results/quality.json has all {len(numbers['runs'])} runs."
    )


#: The rows of docs/worth-it.md, the best prediction first, and what they are. docs/quality.md has the others.
PREDICTIONS = {
    "bad_diff": "the new file, its diff applied badly",
    "draft_05": "a first draft with 5 % wrong lines",
    "original": "the version before the change",
    "draft_20": "a first draft with 20 % wrong lines",
    "older": "an older version",
    "draft_40": "a first draft with 40 % wrong lines",
    "draft_60": "a first draft with 60 % wrong lines",
    "sibling": "another file of the package",
}


def predictions(numbers: dict[str, Any]) -> str:
    """The effect of the quality of the prediction: tokens a step, rejected per accepted."""
    found = [[says, *_ratios(numbers["rows"][label]["runs"][OURS])] for label, says in PREDICTIONS.items()]
    return tables.table(["the prediction is", "tokens a step", "rejected per accepted"], found)


def rows(numbers: dict[str, Any]) -> str:
    """Kinds of text: ours, a peer, and the least lead over any peer at K = 64."""
    found = []
    for label, row in numbers["rows"].items():
        if label in PREDICTIONS:
            continue
        leads = row["leads"]
        [named] = [lead for lead in leads if lead["peer"] == NAMED_PEER]
        speeds = (" at ".join(_ratios(row["runs"][name])) for name in (OURS, NAMED_PEER))
        least = f"{_lead(leads[0])} over `{leads[0]['peer']}`"
        found.append([label, row["runs"][OURS]["records"], *speeds, _lead(named), least])
    heads = ["", "records", f"`{OURS}`", f"`{NAMED_PEER}`", "lead over it", "least lead over any peer"]
    return tables.table(heads, found, "lrrrrl")


def _lead(lead: dict[str, Any]) -> str:
    return "no setting" if lead["ratio"] is None else _signed(lead["ratio"] - 1)


def _signed(share: float) -> str:
    """``0.012`` → ``+1.2%``, with a minus sign that is one."""
    return f"{share:+.1%}".replace("-", "−")


def confidence(numbers: dict[str, Any]) -> str:
    """How far our confidence is from the share that was accepted."""
    deciles = [found for found in numbers["reliability"] if found["drafts"]]
    drafts = sum(found["drafts"] for found in deciles)
    off = sum(abs(found["confidence"] - found["accepted"]) * found["drafts"] for found in deciles) / drafts
    [worst] = [check["value"].split()[0] for check in numbers["checks"] if check["name"] == WORST_DECILE]
    return (
        f"Of {drafts:,} draft tokens it is off by {off:.3f} on average, and by {worst} in the worst decile."
    )


#: The check of the confidence, over all texts.
WORST_DECILE = "confidence: worst |accepted - promised| of a decile"
#: A check of one K over one peer: its K, and the factor that was found.
PEER_CHECK = re.compile(r"K=(\d+): over (.+)")


def checks(numbers: dict[str, Any]) -> str:
    """The verdicts, and whether each holds: of the peers at each K the one that comes nearest."""
    nearest: dict[str, list[dict[str, Any]]] = {}
    for check in numbers["checks"]:
        if match := PEER_CHECK.fullmatch(check["name"]):
            nearest.setdefault(match[1], []).append(check)
    rows = []
    for size, found in nearest.items():
        least = min(found, key=_factor)
        peer = PEER_CHECK.fullmatch(least["name"])
        name = f"K = {size}: over each of {len(found)} peers; least over {peer[2] if peer else ''}"
        holds = all(check["passed"] for check in found)
        rows.append([name, least["value"], least["wanted"], tables.verdict(holds)])
    for check in numbers["checks"]:
        if not PEER_CHECK.fullmatch(check["name"]):
            cells = (str(check[field]).replace("|", "\\|") for field in ("name", "value", "wanted"))
            rows.append([*cells, tables.verdict(check["passed"])])
    return tables.table(["check", "found", "wanted", ""], rows, "llll")


def _factor(check: dict[str, Any]) -> float:
    factor = re.search(r"x (\d+\.\d+)", check["value"])
    return float(factor[1]) if factor else 0.0


def ablation(numbers: dict[str, Any]) -> str:
    """The gain of each mechanism: the rows of benchmarks/results/ablation.json, the baseline first."""
    stored = tables.read("ablation")
    rows = []
    for row in stored["rows"]:
        baseline = row["mechanism"] == "everything"
        effect = "–" if row["change"] is None else _signed(row["change"])
        if baseline:
            effect = " at ".join(_ratios(row["settings"][0]["test"]))
        perfect, unrelated = row["perfect"], row["unrelated"]
        share = unrelated["rejected_from_prediction"] / unrelated["output_tokens"]
        least = f"{perfect['least_steps']}/{perfect['records']}"
        cells = [least, f"{share:.3f}"]
        rows.append(["nothing" if baseline else row["mechanism"], row["instead"], effect, *cells])
    first = stored["rows"][0]["settings"][0]["test"]
    every = "" if stored["one_in"] == 1 else f" (every {stored['one_in']}th of the corpus, of both splits)"
    heads = ["without", "instead", "test split", "perfect", "unrelated"]
    return tables.table(heads, rows, "llrrr") + f"\n\nTest split: {first['records']} outputs{every}, K = {K}."


def executed(numbers: dict[str, Any]) -> str:
    """The results of `benchmarks.compiled.machine_code`, all targets and versions of Triton together."""
    stored = tables.read("machine_code")["triton"]
    targets = [target for version in stored.values() for target in version.values()]
    runs = [run for target in targets for run in target.values()]
    instructions, differences, races = (
        sum(run[name] for run in runs) for name in ("instructions", "differences", "races")
    )
    reached = min(run["reached"] / run["code"] for run in runs)
    names = ", ".join(sorted({target for version in stored.values() for target in version}))
    return (
        f"{instructions:,} instructions of {len(targets[0])} kernels, Triton {' and '.join(stored)}, {names}: "
        f"{differences} differences, {races} races, at least {reached:.1%} of each kernel's code reached."
    )


#: Columns of the page about agents, by the names of `benchmarks.agents`, and their heads.
AGENT_COLUMNS = {
    "gpu_align": "`gpu_align`",
    "gpu_align, views": "with the forms",
    "suffix_decoding_4_deep, views": "suffix decoding, with the forms",
    "prompt_lookup_vllm_v2": "vLLM's n-gram",
}


def _at_equal_rejections(rows: dict[str, Any], peer_views: str, ours: str = "gpu_align, views") -> float:
    """Tokens a step of ours over those of suffix decoding at as many rejected per accepted, between its spec
    factors 1 and 4. peer_views: ", views" gives it the forms, too."""
    names = ours, *(f"suffix_decoding{factor}_deep{peer_views}" for factor in ("", "_4"))
    point, low, high = (
        (row["rejected"] / row["accepted"], row["output_tokens"] / row["steps"])
        for row in (rows[name] for name in names)
    )
    at = min(max((point[0] - low[0]) / (high[0] - low[0]), 0), 1)
    return float(point[1] / (low[1] + at * (high[1] - low[1])))


def agents(numbers: dict[str, Any]) -> str:
    """The steps that drafts save of agents' edits, by collection and form, from benchmarks/results/agents.json."""
    stored = tables.read("agents")
    rows = []
    for case in stored["cases"]:
        as_read = "" if case["read"] == "as shown" else f"{case['read']} → "
        pairs = (" @ ".join(_ratios(case["rows"][name])) for name in AGENT_COLUMNS)
        cells = (pair.replace(" ", "\u00a0") for pair in pairs)
        rows.append([case["collection"], as_read + case["written"], *cells])
    alone, beside = (
        [_at_equal_rejections(case["rows"], with_) - 1 for case in stored["cases"]]
        for with_ in ("", ", views")
    )
    return tables.table(["", "read → written", *AGENT_COLUMNS.values()], rows, "llrrrr") + (
        f"\n\nTokens a step @ rejected per accepted, K = {stored['num_draft_tokens']}. At equal rejections "
        f"`gpu_align` with the forms is at least {_signed(min(alone))} beside suffix decoding without them, and "
        f"{_signed(min(beside))} to {_signed(max(beside))} beside it with them."
    )


#: Sets of `benchmarks.agents announced` that the page shows, and its columns.
ANNOUNCED = {
    "calls": "calls of at most 60 tokens, with their tools",
    "objects, spaced": 'their arguments, by a schema, `": "`',
    "objects, compact": 'by a schema, `":"`',
    "objects, lines": "by a schema, on lines",
}
ANNOUNCED_COLUMNS = {
    "today, gpu_align": "without skeletons",
    "an earlier one, gpu_align": "after an answer of that shape",
    "skeleton, gpu_align": "with skeletons",
    "skeleton, suffix_decoding_4_deep": "suffix decoding, with skeletons",
}


def announced(numbers: dict[str, Any]) -> str:
    """Table what skeletons save, by set, from benchmarks/results/announced.json."""
    rows = []
    for name, told in ANNOUNCED.items():
        counts = [tables.read("announced")[name][column] for column in ANNOUNCED_COLUMNS]
        pairs = (tables.at(each).replace(" ", "\u00a0") for each in counts)
        rows.append([told, f"{counts[0]['output_tokens']:,}", *pairs])
    return tables.table(["", "tokens", *ANNOUNCED_COLUMNS.values()], rows, "lrrrrr") + (
        "\n\nTokens a step @ rejected per accepted, K = 32 (`python -m benchmarks.agents announced`). Calls are "
        "those that a public benchmark accepts."
    )


#: Batches of the tables of times, and their heads.
BATCHES = {1: "batch 1", 64: "64", 1024: "1,024"}


def steps(numbers: dict[str, Any]) -> str:
    """Times of a step on a GPU, warm and cold, and the rows of all stages that ran on it."""
    stored = tables.read("gpu")
    machine = stored["steps"]["machine"]
    # A row that failed has no case; drafts of several tokens take as long as of one.
    timed = [row for row in stored["steps"]["rows"] if "aligned, 8" not in row.get("case", "aligned, 8")]
    times: dict[str, dict[int, str]] = {row["case"]: {} for row in timed}
    for row in timed:
        times[row["case"]][row["batch"]] = f"{_us(row['us'])}/{_us(row['cold_us'])}"
    passed = (
        f"`{stage}` {sum(row['verdict'] == 'passed' for row in found['rows'])} of {len(found['rows'])}"
        for stage, found in stored.items()
        if found["machine"]["gpu"] == machine["gpu"] and "benchmarks.gpu " in found["command"]
    )
    rows = ([case, *(found.get(batch, "–") for batch in BATCHES)] for case, found in times.items())
    return tables.table(["[`us`/`cold_us`](#measure-on-a-gpu)", *BATCHES.values()], rows) + (
        f"\n\n{_machine(stored['steps'])}. Rows that passed: {', '.join(passed)}."
    )


SERVED_BATCHES = (1, 16, 64, 256)
#: Rows of the table of throughput: the rows of the stage.
SERVED = {
    "the plugin, no prediction": "plugin, no prediction",
    "an exact one": "plugin, exact",
    "every 40th token wrong": "plugin, edited",
    "the same, for half of the requests": "plugin, half edited",
    "vLLM's n-gram, 40th wrong": "ngram, edited text in the prompt",
    "vLLM's n-gram, exact": "ngram, exact text in the prompt",
}


def _tokens_per_s(name: str) -> list[int]:
    """Of a row of the stage, for each of `SERVED_BATCHES`."""
    found = {row["name"]: row.get("tokens_per_s", 0) for row in tables.read("gpu")["throughput"]["rows"]}
    return [found[f"batch {batch}: {name}"] for batch in SERVED_BATCHES]


def _factors(name: str, digits: int) -> list[str]:
    pairs = zip(_tokens_per_s(name), _tokens_per_s("none, no drafts"), strict=True)
    return [f"{drafted / plain:.{digits}f}" for drafted, plain in pairs]


def throughput(numbers: dict[str, Any]) -> str:
    """Tokens a second of vLLM on a GPU without drafts, and the factors of drafters."""
    machine = tables.read("gpu")["throughput"]["machine"]
    plain = ["no drafts, tokens a second", *(f"{tokens:,}" for tokens in _tokens_per_s("none, no drafts"))]
    rows = [plain, *([title, *_factors(name, 2)] for title, name in SERVED.items())]
    for row in rows:
        if "half" in row[0]:
            row[1] = "–"  # a batch of one has no half
    head = ["prediction", *map(str, SERVED_BATCHES)]
    return tables.table(head, rows) + f"\n\nvLLM {machine['vllm']}; commit {machine['commit']}."


def served(numbers: dict[str, Any]) -> str:
    """The sentence of the front page about throughput."""
    cases = "plugin, exact", "plugin, edited", "ngram, exact text in the prompt"
    exact, edited, ngram = (", ".join(_factors(case, 1)) for case in cases)
    half = _factors("plugin, half edited", 2)[-1]
    batches, least = ", ".join(map(str, SERVED_BATCHES)), min(_factors("plugin, no prediction", 2))
    return (
        f"On an H200, vLLM 0.33 with an 8B of random weights, batches of {batches}: an exact prediction\n"
        f"gave {exact} times the tokens a second, one with every 40th token wrong {edited},\n"
        f"none {least} or more; vLLM's n-gram with the exact text in the prompt {ngram}.\n"
        f"Predictions for half of a batch of {SERVED_BATCHES[-1]} gave {half}:\n"
        "[on a GPU](docs/worth-it.md#on-a-gpu)."
    )


#: Rows of the table of alignment, and how the suite calls the group of a batch.
ALIGNED = {
    "realignment, 17 new tokens": "realignment, batch {}, 17 new tokens",
    "8,192 new tokens": "realignment, batch {}, 8192 new tokens",
    "LCS of 1,024 tokens": "LCS length, batch {}, 1024 tokens",
    "32,768": "LCS length, batch {}, 32768 tokens",
    "a step, lost": "step, batch {}, 1024 tokens, lost",
}


def alignment(numbers: dict[str, Any]) -> str:
    """Medians of the suite on the machine with a GPU."""
    stored = tables.read("gpu")["suite"]
    found = {(row["group"], row["name"].partition("[")[0]): row for row in stored["rows"]}

    def cell(group: str) -> str:
        on_cpu, on_gpu = (found.get((group, f"test_gpu_align_{name}")) for name in ("cpu", "gpu"))
        if on_gpu is None:
            return "–"
        times = on_gpu["us"], on_gpu["device_us"]["median"]
        return "/".join(["–" if on_cpu is None else _us(on_cpu["us"]), *map(_us, times)])

    rows = ([name, *(cell(group.format(batch)) for batch in BATCHES)] for name, group in ALIGNED.items())
    return tables.table(["µs: CPU/GPU/its device", *BATCHES.values()], rows) + f"\n\n{_machine(stored)}."


def _machine(stage: dict[str, Any]) -> str:
    """The machine that a stage of `benchmarks.gpu` ran on."""
    machine = stage["machine"]
    return (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"commit {machine['commit'][:8]}, {machine['date'][:10]}"
    )


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


#: Kinds of text whose leads README.md names, the largest first.
FRONT_KINDS = ("json", "python", "c", "sql")


def kinds(numbers: dict[str, Any]) -> str:
    """The sentence of README.md on kinds of text."""
    leads = {}
    for kind in FRONT_KINDS:
        [lead] = [lead for lead in numbers["rows"][kind]["leads"] if lead["peer"] == NAMED_PEER]
        name = kind.upper() if kind in ("json", "sql") else kind.capitalize()
        leads[name] = f"{lead['ratio'] - 1:.0%} on {name}".replace("%", " %")
    return f"At K = {K} its lead over suffix decoding is {', '.join(leads.values())}."


def small_model(numbers: dict[str, Any]) -> str:
    """The paragraph of README.md on the small language model."""
    stored = tables.read("real_model")
    unseen = stored["replays"]["unseen"]
    ours, suffix, lookup = (
        _ratios(unseen[name])[0] for name in ("gpu_align", "suffix_decoding_4", "prompt_lookup")
    )
    answers = sum(half == "unseen" and counts for _, half, _, counts in stored["answers"])
    served = [row for row in stored["served"] if row["counts"]]
    assert all(row["identical"] for row in served)
    used, none = (sum(row["cpu_s"][mode] for row in served) for mode in ("gpu_align", "none"))
    return (
        f"A small language model (SmolLM2-135M-Instruct, {answers} of its answers that no setting was chosen on, "
        f"K = 32)\ngives less: {ours} tokens a step, suffix decoding {suffix}, prompt lookup {lookup}. In a "
        f"server on a CPU, {len(served)} tasks took {used:.0f} s\nof processor time instead of {none:.0f}, with "
        "the same texts: [published experiments](docs/published.md)."
    )


#: Page → its blocks by name.
PAGES = {
    DOCS.parent / "README.md": {
        "headline": headline,
        MAIN_BLOCK: front_page,
        "kinds": kinds,
        "small-model": small_model,
        "served": served,
    },
    DOCS / "worth-it.md": {"predictions": predictions, "throughput": throughput},
    DOCS / "agents.md": {"announced": announced, "agents": agents},
    DOCS / "tuning.md": {"choose-k": by_num_draft_tokens},
    DOCS / "developer" / "compiled-kernels.md": {
        "executed": executed,
        "steps": steps,
    },
    DOCS / "quality.md": {MAIN_BLOCK: table, "rows": rows, "confidence": confidence, "alignment": alignment},
    DOCS / "developer" / "mechanisms.md": {"ablation": ablation, "checks": checks},
    DOCS.parent / "benchmarks" / "quality" / "README.md": {"drafters": more_drafters},
}


def filled(page: Path, numbers: dict[str, Any]) -> str:
    """The text of one of `PAGES` with all its blocks made anew."""
    return tables.fill(page.read_text(encoding="utf-8"), PAGES[page], numbers)


def main() -> None:
    numbers = tables.read("quality")
    for page in PAGES:
        page.write_text(filled(page, numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
