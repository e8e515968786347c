"""Scripted answers in the format of each of vLLM's parsers, and a tokenizer with their markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, Mapping[str, Any]]
#: Makes one call, or all calls of an answer, as a model writes them.
Format = Callable[[list[Call]], str]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _each(
    make: Callable[[int, str, Mapping[str, Any]], str], around: str = "{}", between: str = ""
) -> Format:
    """make: of the call's number, its name and its arguments; around: of all calls."""

    def write(calls: list[Call]) -> str:
        return around.replace("{}", between.join(make(n, *call) for n, call in enumerate(calls)))

    return write


def _call(template: str, around: str = "{}", between: str = "") -> Format:
    """template: with NUMBER, NAME, and ARGUMENTS, which are JSON."""

    def make(number: int, name: str, arguments: Mapping[str, Any]) -> str:
        begun = template.replace("NUMBER", str(number)).replace("NAME", name)
        return begun.replace("ARGUMENTS", json.dumps(arguments))

    return _each(make, around, between)


def _json(key: str, before: str = "", after: str = "", between: str = "", around: str = "{}") -> Format:
    """Calls as objects with `name` and `key`; before, after: of each call."""
    return _call(f'{before}{{"name": "NAME", "{key}": ARGUMENTS}}{after}', around, between)


def _tags(
    call: str,
    argument: str,
    around: str = "{}",
    between: str = "",
    write: Callable[[Any], str] = _text,
    comma: str = "",
) -> Format:
    """call: with NAME and ARGUMENTS; argument: with KEY and VALUE, of which several have `comma` between them."""

    def make(_: int, name: str, arguments: Mapping[str, Any]) -> str:
        each = (argument.replace("KEY", key).replace("VALUE", write(arguments[key])) for key in arguments)
        return call.replace("NAME", name).replace("ARGUMENTS", comma.join(each))

    return _each(make, around, between)


def _pythonic(around: str, between: str = ", ") -> Format:
    def make(_: int, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return _each(make, around, between)


_XML = (
    "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
)
_GLM = ("<tool_call>NAME\nARGUMENTS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
_HY = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
_INVOKE = ('<invoke name="NAME">\nARGUMENTS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n')
_ATEM = (
    '<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n',
    '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
)
_MUSE = _tags(
    *_ATEM,
    "<|start|>assistant to=functions.write<|message|><atem:function_calls>\n{}</atem:function_calls><|eom|>",
)
_NAMESPACE = "]<]minimax[>["


def _dsml(outer: str, space: str = "") -> Format:
    mark = f"｜DSML｜{space}"
    return _tags(
        f'<{mark}invoke name="NAME">\nARGUMENTS</{mark}invoke>\n',
        f'<{mark}parameter name="KEY" string="true">VALUE</{mark}parameter>\n',
        f"<{mark}{outer}>\n{{}}</{mark}{outer}>",
    )


def _kimi_k3(calls: list[Call]) -> str:
    def block(kind: str, body: str, more: str = "") -> str:
        return f"<|open|>{kind}{more}<|sep|>{body}<|close|>{kind}<|sep|>"

    written = []
    for number, (name, arguments) in enumerate(calls):
        types = {str: "string", int: "number", dict: "object", list: "array"}
        body = "".join(
            block("argument", _text(value), f' key="{key}" type="{types[type(value)]}"')
            for key, value in arguments.items()
        )
        written.append(block("call", body, f' tool="{name}" index="{number + 1}"'))
    return block("tools", "".join(written))


#: By the parser's name.
TOOLS: dict[str, Format] = {
    "apertus": _call('{"NAME": ARGUMENTS}', "<|tools_prefix|>[{}]<|tools_suffix|>", ", "),
    "deepseek_v3": _call(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _call(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": _tags(*_INVOKE, "<dots_function_call>\n{}</dots_function_call>"),
    "ernie45": _json("arguments", "<tool_call>\n", "\n</tool_call>\n"),
    "functiongemma": _tags(
        "<start_function_call>call:NAME{ARGUMENTS}<end_function_call>", "KEY:<escape>VALUE<escape>"
    ),
    "gemma4": _tags(
        "<|tool_call>call:NAME{ARGUMENTS}<tool_call|>",
        "KEY:VALUE",
        comma=",",
        write=lambda value: f'<|"|>{value}<|"|>' if isinstance(value, str) else "3",
    ),
    "gigachat3": _json("arguments", "<|function_call|>"),
    "glm45": _tags(*_GLM, between="\n"),
    "granite": _json("arguments", between=", ", around="<|tool_call|>[{}]"),
    "granite-20b-fc": _json("arguments", "<function_call> "),
    "granite4": _json("arguments", "<tool_call>", "</tool_call>"),
    "hermes": _json("arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
    "hunyuan_a13b": _json("arguments", between=", ", around="<tool_calls>[{}]</tool_calls>"),
    "hy_v3": _tags("<tool_call>NAME<tool_sep>ARGUMENTS</tool_call>", _HY, "<tool_calls>{}</tool_calls>"),
    "hy_v4": _tags("<tool_call>NAMEARGUMENTS</tool_call>", _HY, "<tool_calls>{}</tool_calls>"),
    "inkling": _call(
        '<|message_model|><|content_invoke_tool_json|>{"name":"NAME","args":ARGUMENTS}<|end_message|>'
    ),
    "internlm": _json("parameters", around="<|action_start|><|plugin|>\n{}<|action_end|>\n"),
    "jamba": _json("arguments", between=", ", around="<tool_calls>[{}]</tool_calls>"),
    "k2_horizon": _tags(
        "<ifm|tool_call>NAMEARGUMENTS</ifm|tool_call>",
        "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>VALUE</ifm|arg_value>",
        "<ifm|tool_calls>{}</ifm|tool_calls>",
    ),
    "kimi_k2": _call(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    ),
    "kimi_k3": _kimi_k3,
    "lfm2": _pythonic("<|tool_call_start|>[{}]<|tool_call_end|>"),
    "llama3_json": _json("parameters", between="; "),
    "llama4_pythonic": _pythonic("<|python_start|>[{}]<|python_end|>"),
    "longcat": _json("arguments", "<longcat_tool_call>", "</longcat_tool_call>", "\n"),
    "minicpm5": _tags(
        '<function name="NAME">ARGUMENTS</function>', '<param name="KEY">VALUE</param>', between="\n"
    ),
    "minimax_m2": _tags(*_INVOKE, "<minimax:tool_call>\n{}</minimax:tool_call>"),
    "minimax_m3": _tags(
        f'{_NAMESPACE}<invoke name="NAME">ARGUMENTS{_NAMESPACE}</invoke>',
        f"{_NAMESPACE}<KEY>VALUE{_NAMESPACE}</KEY>",
        f"{_NAMESPACE}<tool_call>\n{{}}\n{_NAMESPACE}</tool_call>",
        "\n",
    ),
    "mistral": _call("[TOOL_CALLS]NAMEARGUMENTS"),
    "muse": _MUSE,
    "muse_glimmer": _MUSE,
    "olmo3": _pythonic("<function_calls>{}</function_calls>", "\n"),
    "phi4_mini_json": _json("arguments", between=", ", around="functools[{}]"),
    "plamo3": _call(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>ARGUMENTS"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        "<|plamo:begin_tool_requests:plamo|>{}<|plamo:end_tool_requests:plamo|>",
    ),
    "poolside_v1": _tags(*_GLM, between="\n"),
    "pythonic": _pythonic("[{}]"),
    "qwen3_coder": _tags(*_XML, between="\n"),
    "seed_oss": _tags(_XML[0].replace("tool_call>", "seed:tool_call>"), _XML[1], between="\n"),
    "step3": _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">ARGUMENTS</steptml:invoke>'
        "<｜tool_call_end｜>",
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        "<｜tool_calls_begin｜>{}<｜tool_calls_end｜>",
    ),
    "xlam": _json("arguments", between=", ", around="[{}]"),
}
#: Formats with one call an answer.
SINGLE = {"gigachat3", "internlm"}
#: Names for a format that has another name above.
SAME = {
    "glm47": "glm45",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "musespark1x": "muse",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
}

_THINK = "<think>\n{}\n</think>\n\n{}"
_TO_SELF = " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>{}<|eot|>"
#: By the parser's name; the default is `<think>`. "{}": the thought, then the answer.
REASONING: dict[str, str] = {
    "ernie45": "<think>\n{}\n</think>\n\n\n<response>\n{}\n</response>\n",
    "gemma4": "<|channel>thought\n{}<channel|>{}",
    "granite": "Here is my thought process: {} Here is my response: {}",
    "hunyuan_a13b": "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
    "inkling": (
        "<|message_model|><|content_thinking|>{}<|end_message|><|message_model|><|content_text|>{}<|end_message|>"
    ),
    "k2_horizon": "<ifm|think>{}</ifm|think>{}",
    "kimi_k3": "<|open|>think<|sep|>{}<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>",
    "minimax_m3": "<mm:think>{}</mm:think>{}",
    "mistral": "[THINK]{}[/THINK]{}",
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), _TO_SELF),
    "plamo3": "<|plamo:begin_think:plamo|>{}<|plamo:end_think:plamo|>{}",
    "seed_oss": "<seed:think>{}</seed:think>{}",
}


def format_of(name: str) -> Format:
    return TOOLS[SAME.get(name, name)]


def thought_of(name: str) -> str:
    return REASONING.get(name, _THINK)


#: Parsers whose answers are no text that a test can script.
ELSEWHERE = {
    "openai": "gpt-oss: parsed by harmony, from token ids of its own vocabulary",
    "openai_gptoss": "the same",
    "hf": "by a template of the checkpoint",
    "beam": "by a format that is not in this table",
    "cohere_command3": "needs cohere-melody",
    "cohere_command4": "needs cohere-melody",
}
_MORE = """
<think> </think> <|START_THINKING|> <|END_THINKING|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>
<|START_TEXT|> <|END_TEXT|> <0x0A> <response> </response> [THINK] [/THINK] [TOOL_CALLS] [ARGS] [CALL_ID]
<assistant> <|user|> <|assistant|> <|observation|> <|system|> <|python_tag|> <|turn> <|tool_response>
<|im_start|> <|im_end|> <|role_sep|> <|message_sep|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>
<|content_invoke_tool_text|> <|content_tool_error|> <|content_model_end_sampling|> <|plamo:tag|> <ifm|think>
</ifm|think> <ifm|think_fast> </ifm|think_fast> <ifm|think_faster> </ifm|think_faster> <seed:bos> <seed:eos>
<|begin_of_box|> <|end_of_box|> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>
""".split()  # noqa: SIM905 - a list of them is one a line
#: What reads as a tag, but consists of ordinary tokens in the models that write it.
_PLAIN = re.compile(r"</?(?:function|param|parameter|invoke|path|lines|text|end|answer|steptml|atem)\b")


def make_tokenizer() -> Any:
    """A token is a byte, or a marker of one of the formats."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    example = [("write", {"path": "a", "lines": 1})]
    found = re.findall(
        r"<[^<>\s]+>|<｜DSML｜ ?\w+",
        " ".join([*(write(example) for write in TOOLS.values()), *REASONING.values()]),
    )
    markers = dict.fromkeys([*_MORE, *(each for each in found if not _PLAIN.match(each))])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Olmo's parser looks for the last ones, which its models write; this tokenizer never does.
    vocabulary = [*letters, "Ġ</", "</", "think", ">", "\n"]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(dict.fromkeys(vocabulary))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in markers])
    tokenizer.add_special_tokens(["<|eos|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")
