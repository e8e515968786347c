"""Calls of tools and JSON by schema, drafted from what the request announces: `gpu_align.texts.skeletons`.

Of the Berkeley Function Calling Leaderboard (``pip download --no-deps bfcl-eval``, unpacked: its folder
``bfcl_eval/data``) those calls that it accepts: in a chat with their tools, if they have at most 60 tokens; and
their arguments as JSON by the schema of the function, in three spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.quality.runs import Counts
from gpu_align.texts import skeletons
from gpu_align.tools.simulate.policies import OURS, SHIPPED_PACK
from gpu_align.tools.simulate.replay import (
    NO_PACK,
    Record,
    load_tokenizer,
    make_policies,
    runnable_policy_names,
    simulate,
)

K, TOKENIZER, SHORT = 32, "tekken", 60
#: Calls of each file.
MOST = 60
PEER = "suffix_decoding_4_deep"
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


class Call(NamedTuple):
    """A call that is accepted, what is asked, the tools to choose from; another call of that shape."""

    id: str
    question: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    name: str
    arguments: dict[str, Any]

    @property
    def earlier(self) -> dict[str, Any]:
        return {key: "example" if isinstance(value, str) else 1 for key, value in self.arguments.items()}


#: Row → record, of one answer.
Rows = dict[str, Record]


def rows_of(name: str, prompt: str, skeleton: list[int], answer: str, earlier: str) -> Rows:
    """Rows without a prediction; earlier: an answer of the same shape, in the conversation before."""
    today = Record(name, encode(prompt), [], encode(answer), TOKENIZER)
    before = encode(f"<|im_start|>user\nFirst:<|im_end|>\n<|im_start|>assistant\n{earlier}\n")
    return {
        "today": today,
        "an earlier one": replace(today, prompt=before + today.prompt),
        "skeleton": replace(today, prediction=skeleton, kind=skeletons.kind_of(skeleton)),
    }


def calls_in(folder: Path) -> Iterator[Call]:
    for which in BFCL:
        told = _lines(folder / f"possible_answer/BFCL_v4_{which}.json")
        accepted = {each["id"]: each["ground_truth"] for each in told}
        for each in islice(_lines(folder / f"BFCL_v4_{which}.json"), MOST):
            tools = [{"type": "function", "function": _typed(function)} for function in each["function"]]
            [(name, values)] = accepted[each["id"]][0].items()
            arguments = {key: _first(value[0]) for key, value in values.items() if value and value[0] != ""}
            yield Call(each["id"], each["question"][0], tools, name.replace(".", "_"), arguments)


def short_calls(calls: Iterable[Call]) -> Iterator[Rows]:
    for each in calls:
        text, earlier = call(each.name, each.arguments), call(each.name, each.earlier)
        if len(encode(text)) <= SHORT:
            prompt, pieces = render(each.question, True, each.tools), CALLS.of_tools(each.tools)
            yield rows_of(each.id, prompt, skeletons.join(pieces, _encode_all), text, earlier)


def objects(calls: Iterable[Call], style: skeletons.Style) -> Iterator[Rows]:
    """Those of a server that has seen an answer in this style."""
    comma, colon, indent = style
    spelling: dict[str, Any] = {"ensure_ascii": False, "separators": (comma, colon), "indent": indent}
    for each in calls:
        [schema] = (
            tool["function"]["parameters"] for tool in each.tools if tool["function"]["name"] == each.name
        )
        text, earlier = (
            f"{json.dumps(made, **spelling)}<|im_end|>" for made in (each.arguments, each.earlier)
        )
        styles = skeletons.styles_of({}, style)
        pieces = [piece for given in styles for piece in skeletons.of_schema(schema, given)]
        skeleton = skeletons.join(pieces, _encode_all, True)  # no answer is another
        yield rows_of(each.id, render(each.question, True), skeleton, text, earlier)


def _encode_all(texts: Iterable[str]) -> list[list[int]]:
    return [*map(encode, texts)]


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


def measure_calls(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Print the counts of each set by row and drafter, and return them. The peer has the skeletons, too."""
    calls = [*calls_in(folder)]
    sets = {"calls": short_calls(calls)}
    sets |= {f"objects, {name}": objects(calls, style) for name, style in STYLES.items()}
    found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in sets}
    for name, cases in sets.items():
        rows = list(cases)
        for row in rows[0]:
            peers = [PEER] if row == "skeleton" and PEER in runnable_policy_names() else []
            # As in a server: JSON by a schema is drafted without the shipped recipes.
            pack = NO_PACK if name.startswith("objects") and row == "skeleton" else SHIPPED_PACK
            records = [each[row] for each in rows]
            for result in simulate(records, make_policies([OURS, *peers], records, K, recipes=pack), K):
                label = f"{row}, {result.name.split()[0]}"
                found[name][label] = Counts.of(result.pairs).as_json()
                print(f"{name:22} {label:38} {tables.at(found[name][label])}", flush=True)
    return found
