"""Skeletons of calls by chat templates of many families, and of JSON by schemas."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_align import Drafter, DrafterConfig, TextKind
from gpu_align.ops.layout import FIRST_GAP
from gpu_align.texts import skeletons
from gpu_align.texts.skeletons import COMPACT, LINES, SPACED, Calls, SkeletonError, of_schema
from tests.gpu_align.engine import BACKENDS, device_of

jinja2 = pytest.importorskip("jinja2.sandbox")

_CHATML = (
    "<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}",
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
)
_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
_LLAMA = _HEADER.format("{{ m.role }}") + "{{ m.content or '' }}", "<|eot_id|>", _HEADER.format("assistant")
_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_EACH, _TEXT = "{% for k, v in c.arguments | items %}", "{{ v if v is string else v | tojson }}"
#: A family → its chat template in words of our own, after the published one: a turn, its end, the beginning of the
#: next answer, and one call.
FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "Qwen 2.5, Hermes": (*_CHATML, f"\n<tool_call>\n{_JSON}\n</tool_call>"),
    "Qwen 3 Coder": (
        *_CHATML,
        "\n<tool_call>\n<function={{ c.name }}>\n" + _EACH
        + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "Llama 3.1": (*_LLAMA, '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'),
    "Llama 3.2, Python": (
        *_LLAMA,
        ("[{{ c.name }}({% for k in c.arguments %}{{ k }}={{ c.arguments[k] }}"
        "{% if not loop.last %}, {% endif %}{% endfor %})]"),
    ),
    "Mistral Small 3.1": (
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% endif %}", "{% if calls %}</s>{% endif %}", "",
        ("{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        f'[TOOL_CALLS] [{_JSON[:-1]}, "id": "{{{{ call.id }}}}"}}]'),
    ),
    "DeepSeek V3.1": (
        "{% if m.role == 'user' %}<｜User｜>{% else %}<｜Assistant｜></think>{% endif %}{{ m.content }}",
        "{% if calls %}<｜end▁of▁sentence｜>{% endif %}", "<｜Assistant｜></think>",
        "{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments + '<｜tool▁call▁end｜>' }}",
    ),
    "GLM 4.6": (
        "<|{{ m.role }}|>{% if m.role == 'assistant' %}\n<think></think>{% endif %}\n{{ m.content }}",
        "", "<|assistant|>",
        (f"\n<tool_call>{{{{ c.name }}}}\n{_EACH}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}"
        "</arg_value>\n{% endfor %}</tool_call>"),
    ),
    "MiniMax M2": (
        "]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}", "[e~[\n", "]~b]ai\n<think>\n",
        ('\n<minimax:tool_call>\n<invoke name="{{ c.name }}">\n'
        f'{_EACH}<parameter name="{{{{ k }}}}">{_TEXT}</parameter>\n'
        "{% endfor %}</invoke>\n</minimax:tool_call>"),
    ),
    "Phi 4 mini": (
        "<|{{ m.role }}|>{{ m.content or '' }}", "<|end|>", "<|assistant|>",
        "<|tool_call|>{{ c | tojson }}<|/tool_call|>",
    ),
    "Command R7B": (
        "<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else 'USER' }}_TOKEN|>{{ m.content }}",
        "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ c.name }}", '
        '"parameters": {{ c.arguments | tojson }}}\n]<|END_ACTION|>'),
    ),
    "Granite 3.3": (
        "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}", "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>", f"<|tool_call|>[{_JSON}]",
    ),
    "gpt-oss": (
        "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}", "",
        "<|start|>assistant",
        ("<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
        "{{ c.arguments | tojson }}<|call|>"),
    ),
}  # fmt: skip


def renderer(turn: str, end: str, opened: str, call: str) -> Callable[[list[dict[str, Any]], bool], str]:
    """As transformers renders a chat template."""
    environment = jinja2.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    text = (
        "{% for m in messages %}{% set calls = m.tool_calls or [] %}" + turn + "{% for call in calls %}"
        "{% set c = call.function %}" + call + "{% endfor %}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + opened + "{% endif %}"
    )  # fmt: skip
    render = environment.from_string(text).render
    return lambda messages, ends_open: str(render(messages=messages, add_generation_prompt=ends_open))


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


STRING, INTEGER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "boolean"))
READ = tool("read_file", path=STRING, line=INTEGER)
WRITE = tool("write_file", path=STRING, text={"type": "object", "properties": {"body": STRING, "n": INTEGER}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_is_the_call_that_the_template_renders_without_its_values(family: str) -> None:
    """Written with values, which are cut out of the answer here."""
    render = renderer(*FAMILIES[family])
    for given, arguments in (
        (READ, {"path": "a value", "line": 123456}),
        (WRITE, {"path": "a value", "text": {"body": "another one", "n": 123456}}),
    ):
        name = given["function"]["name"]
        asked = [{"role": "user", "content": "Read it."}]
        function = {"name": name, "arguments": arguments}
        if family == "DeepSeek V3.1":
            function["arguments"] = json.dumps(arguments)
        call = {"id": "123456789", "type": "function", "function": function}
        whole = render([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
        start = render(asked, True)
        begin = next(n for n, (a, b) in enumerate(zip(whole, start + "\0", strict=False)) if a != b)
        text = whole[begin:].rstrip()
        for value, gap in (("123456789", "\0"), ("123456", "\1"), ("a value", "\0"), ("another one", "\0")):
            text = text.replace(value, gap)
        pieces = re.findall("([^\0\1]+)([\0\1]?)", text)  # the blank before a number stays
        expected = [piece if gap == "\1" else piece.rstrip(" ") for piece, gap in pieces]
        assert Calls(render).of_tools([given]) == expected


def test_several_tools_begin_with_what_all_have() -> None:
    calls = Calls(renderer(*FAMILIES["Llama 3.1"]))
    first, second = '{"name": "a", "parameters": {"x": "', '{"name": "b", "parameters": {}}<|eot_id|>'
    found = calls.of_tools([tool("a", x=STRING), {"name": "b"}, "no tool", {"function": 5}])
    assert found == ['{"name": "', first, '"}}<|eot_id|>', second]
    # Of names that begin alike the rest is known after the name.
    found = calls.of_tools([tool("get_a", x=STRING), {"name": "b"}, {"name": "get_c"}])
    parted = ['{"name": "get_a', 'get_a", "parameters": {"x": "', '"}}<|eot_id|>']
    last = ['{"name": "get_c', 'get_c", "parameters": {}}<|eot_id|>']
    assert found == ['{"name": "', *parted, second, *last]


@pytest.mark.parametrize("after", ["", " true"])
@pytest.mark.parametrize(("family", "true"), [("Qwen 2.5, Hermes", "true"), ("Llama 3.2, Python", "True")])
def test_booleans_read_as_the_template_writes_them(family: str, true: str, after: str) -> None:
    calls = Calls(renderer(*FAMILIES[family][:-1], FAMILIES[family][-1] + after))
    found = calls.of_tools([tool("a", flag=BOOLEAN, word={"enum": ["x", "y"]})])
    assert [each for each in found if true in each and "word" in each]
    assert len([each for each in found if "flag" in each]) == 3


OBJECT = {"type": "object", "properties": {"a": STRING, "b": INTEGER}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "style", "expected"),
    [
        # In the order of the schema, whatever is required; the blank before a number is its own.
        (OBJECT, SPACED, ['{"a": "', '", "b": ', "}"]),
        (OBJECT, COMPACT, ['{"a":"', '","b":', "}"]),
        (OBJECT, LINES, ['{\n  "a": "', '",\n  "b": ', "\n}"]),
        ({"properties": {"kind": {"const": "x"}, "b": INTEGER}}, SPACED, ['{"kind": "x", "b": ', "}"]),
        (
            {"properties": {"a": {"enum": ["x", "y"]}, "b": BOOLEAN}},
            SPACED,
            ['{"a": "', '{"a": "x", "b":', '{"a": "y", "b":', '", "b": true}', '", "b": false}'],
        ),
        ({"type": "array", "items": OBJECT}, SPACED, ['[{"a": "', '", "b": ', '}, {"a": "', '", "b": ', "}]"]),
        ({"properties": {"a": {"$ref": "#/$defs/A~1B"}}, "$defs": {"A/B": OBJECT}}, SPACED,
         ['{"a": {"a": "', '", "b": ', "}}"]),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, STRING]}}}, SPACED, ['{"a": "', '"}']),
        ({"properties": {"a": {"type": ["null", "string"]}, "b": {"enum": [1, None]}}}, SPACED,
         ['{"a": "', '", "b":', '", "b": 1}', '", "b": null}']),
        ({"properties": {"a": {"type": "array"}, "b": {"type": "object"}, "c": True}}, SPACED,
         ['{"a":', ', "b":', ', "c": "', '"}']),
        # A string where no type is told.
        (True, SPACED, ['"', '"']),
        ({"properties": {"a": {"description": "d"}, "b": {"type": {}}}}, SPACED, ['{"a": "', '", "b": "', '"}']),
        ({"properties": {"a": {"$ref": "https://example.org"}, "b": {"$ref": "#/no/such"}}}, SPACED,
         ['{"a": "', '", "b": "', '"}']),
        ({"properties": {"a": {"enum": ['"', "x\ny", "z"]}}}, SPACED, ['{"a": "', '{"a": "z"}', '"}']),
        ({"properties": {"a": {"enum": ['"', {"b": 1}]}}}, SPACED, ['{"a":', "}"]),
        ({"properties": {"long_enough_name": BOOLEAN}}, LINES,
         ['{\n  "long_enough_name":', 'g_enough_name": true\n}', 'g_enough_name": false\n}']),
    ],
)  # fmt: skip
def test_json_by_a_schema(schema: Any, style: Any, expected: list[str]) -> None:
    assert of_schema(schema, style) == expected


MANY = {"properties": {f"p{n}": STRING for n in range(1000)}}
RECURSIVE = {"properties": {"a": {"$ref": "#"}}}
DEEP: dict[str, Any] = {}
for _ in range(50):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (MANY, "size"),
        (DEEP, "size"),
        ({"properties": {f"p{n}": {"type": "array", "items": OBJECT} for n in range(30)}}, "size"),
        (RECURSIVE, "size"),
        ({"items": {"$ref": "#/$defs/A"}, "type": "array",
          "$defs": {"A": {"items": {"$ref": "#/$defs/A"}, "type": "array"}}}, "size"),
        *(({"properties": {name: STRING}}, "names") for name in ('"', "a\nb", "a\0b", "", "ü", "a" * 300)),
    ],
)  # fmt: skip
def test_what_has_no_skeleton_says_why_at_once(schema: Any, reason: str) -> None:
    calls = Calls(renderer(*FAMILIES["Qwen 2.5, Hermes"]))
    tools = [{"function": {"name": "f", "description": "x" * 2**20, "parameters": schema}}]
    for make in (lambda: of_schema(schema), lambda: calls.of_tools(tools)):
        begun = time.process_time()
        with pytest.raises(SkeletonError) as found:
            make()
        assert found.value.reason == reason
        assert reason in skeletons.REASONS
        assert time.process_time() - begun < 0.05


def test_templates_without_calls_and_too_many_tools() -> None:
    def raises(messages: Any, ends_open: bool) -> str:
        raise RuntimeError

    for render in (lambda messages, ends_open: "a prompt", raises):
        with pytest.raises(SkeletonError, match="template"):
            Calls(render)
    calls = Calls(renderer(*FAMILIES["Phi 4 mini"]))
    for given, deadline, reason in (
        ([READ] * 300, 1e9, "size"),
        ([READ], 0.0, "time"),
        ([tool('"')], 1e9, "names"),
    ):
        with pytest.raises(SkeletonError, match=reason):
            calls.of_tools(given, deadline)


def characters(texts: list[str]) -> list[list[int]]:
    return [[*map(ord, text)] for text in texts]


def test_a_gap_before_between_and_after_pieces() -> None:
    found = skeletons.join(["ab", "", "c"], characters)
    assert found == [FIRST_GAP, 97, 98, FIRST_GAP + 1, FIRST_GAP + 2, 99, FIRST_GAP + 3]
    assert skeletons.join(["ab", "", "c"], characters, forced=True) == found[1:]
    with pytest.raises(SkeletonError, match="size"):
        skeletons.join(["a"] * 2**16, characters)


def test_a_blank_before_a_number_is_drafted_where_it_is_a_token_of_its_own() -> None:
    def with_digit(texts: list[str]) -> list[list[int]]:
        return [[*map(ord, text[:-2]), 1000 + ord(text[-1])] for text in texts]

    assert skeletons.join(["a: "], characters)[1:-1] == [*map(ord, "a: ")]
    assert skeletons.join(["a: "], with_digit)[1:-1] == [*map(ord, "a:")]


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([FIRST_GAP] + [1] * 15, TextKind.SKELETON),
        ([1] * 15 + [FIRST_GAP], TextKind.SKELETON),
        ([1] * 16 + [FIRST_GAP], TextKind.RELATED_MEMORY),
        ([1] * 31 + [FIRST_GAP + 1] * 2, TextKind.RELATED_MEMORY),
        ([1], TextKind.RELATED_MEMORY),
    ],
)
def test_the_kind_of_a_text_with_skeletons(tokens: list[int], kind: TextKind) -> None:
    assert skeletons.kind_of(tokens) is kind


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_draft_reaches_over_a_gap(backend: str) -> None:
    """And no value that stood at one is written at another, where the same tokens stand around it."""
    K, size = 8, 64
    device = device_of(backend)
    drafter = Drafter(
        max_slots=1, max_context_len=size, max_prediction_len=size, num_draft_tokens=K, vocab_size=50,
        device=device, backend=backend, config=DrafterConfig(use_context=False),
    )  # fmt: skip
    pieces = [[1, 2, 3, 4, 5, 8], [9, 11, 12, 13, 8], [9, 14, 15, 16, 8], [9, 17, 18, 19, 8]]
    drafter.add(0, skeletons.join("0123", lambda texts: [pieces[int(text)] for text in texts]), 0)
    num_drafted, output = 0, list[int]()
    one, zero = (torch.full((1,), n, device=device) for n in (1, 0))
    for value, piece in enumerate(pieces, 30):
        for token in (*piece, value, value):
            output.append(token)
            drafter.token_ids[0, : len(output)] = torch.tensor(output)
            drafter.total_len.fill_(len(output))
            draft = drafter.propose(zero, one.int())
            found = draft.token_ids[0, : int(draft.length[0])].tolist()
            rest = piece[piece.index(token) + 1 :] if token in piece else found
            assert found == rest[: len(found)]
            assert not {30, 31, 32, 33, 34} & {*found}
            num_drafted += len(found)
    assert num_drafted > 20
    with pytest.raises(ValueError, match=r"prediction\[1\]: expected 0 <= id < 50, found 50"):
        drafter.add(0, [FIRST_GAP, 50], 0)
