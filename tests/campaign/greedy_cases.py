"""What is asked for and what is predicted: 20 features of a request and 17 kinds of predictions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tokens = list[int]
#: Ids of the model's vocabulary that are no special tokens.
WORDS = range(4, 700)
MAX_MODEL_LEN = 256
#: A stop token stands about here in the output.
_PLACE = 9
#: `n` > 1 is refused at temperature 0. At the lowest one the likeliest token is drawn, if it leads by this much:
#: the others have a probability of exp(-25) each.
COLD, LEAD = 0.01, 0.25

_SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["xy", "zw"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["ok", "kind", "list"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Probe:
    """A prompt and what the engine without the plugin makes of it.

    leads: by how much each token's log probability exceeds the next one's.
    """

    prompt: Tokens
    output: Tokens
    text: str
    leads: list[float]

    @property
    def calm(self) -> int:
        """So many tokens lead by `LEAD`, up to the first that does not."""
        return next((i for i, lead in enumerate(self.leads) if lead < LEAD), len(self.leads))


def prompt_of(draw: random.Random) -> Tokens:
    """Short ones, and some that are prefilled in two or three chunks; some repeat themselves."""
    length = draw.choice((5, 20, 33, 60, 100, 150))
    words = [draw.choice(WORDS) for _ in range(length)]
    return words if draw.random() < 0.7 else (words[: length // 3 + 1] * 3)[:length]


def _stop_token(probe: Probe) -> tuple[int, int]:
    """A token of the output and where it comes for the first time."""
    firsts = [i for i, token in enumerate(probe.output) if token not in probe.output[:i]]
    place = min(firsts, key=lambda i: abs(i - _PLACE))
    return probe.output[place], place


def _stop_text(probe: Probe, share: float) -> str:
    """Three characters of the text, most likely of two tokens, about there; whole ones."""
    begin = int(len(probe.text) * share)
    return next(
        (
            probe.text[i : i + 3]
            for i in range(begin, len(probe.text) - 3)
            if "\ufffd" not in probe.text[i : i + 3]
        ),
        "aaa",
    )


def _min_tokens(probe: Probe, beyond: int) -> dict[str, Any]:
    """The stop token comes just before, at or just after `min_tokens`."""
    token, place = _stop_token(probe)
    return {"stop_token_ids": [token], "min_tokens": max(0, place + beyond)}


_JSON = {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False, "max_tokens": 48}
_REGEX = {"structured_outputs": {"regex": "(a[0-9]{1,2}[02468]){6}"}, "ignore_eos": False, "max_tokens": 32}

#: Feature → sampling parameters beside temperature 0.
FEATURES: dict[str, Callable[[Probe], dict[str, Any]]] = {
    "nothing": lambda probe: {},
    "stop string": lambda probe: {"stop": [_stop_text(probe, 0.5)]},
    "two stop strings, kept": lambda probe: {
        "stop": [_stop_text(probe, 0.6), _stop_text(probe, 0.3)],
        "include_stop_str_in_output": True,
    },
    "stop token": lambda probe: {"stop_token_ids": [_stop_token(probe)[0]]},
    "min_tokens before the stop token": lambda probe: _min_tokens(probe, -1),
    "min_tokens beyond the stop token": lambda probe: _min_tokens(probe, 2),
    "min_tokens and a stop string": lambda probe: {"stop": [_stop_text(probe, 0.3)], "min_tokens": 12},
    "logprobs": lambda probe: {"logprobs": 2},
    "prompt_logprobs": lambda probe: {"logprobs": 0, "prompt_logprobs": 1},
    "presence_penalty": lambda probe: {"presence_penalty": 1.7},
    "frequency_penalty": lambda probe: {"frequency_penalty": 1.7},
    "repetition_penalty": lambda probe: {"repetition_penalty": 2.0},
    "all penalties, logprobs": lambda probe: {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logprobs": 1,
    },
    "JSON schema": lambda probe: dict(_JSON),
    "regular expression": lambda probe: dict(_REGEX),
    "n = 2": lambda probe: {"n": 2, "temperature": COLD, "max_tokens": max(1, probe.calm)},
    "min_p": lambda probe: {"min_p": 0.1},
    "logit_bias": lambda probe: {"logit_bias": {probe.output[2]: -100.0, 40: 2.0}},
    "max_tokens 1 to 5": lambda probe: {"max_tokens": 1 + len(probe.prompt) % 5},
    "bad words, allowed tokens": lambda probe: {"allowed_token_ids": list(range(60, 400))},
}


def _middle(output: Tokens, draw: random.Random) -> int:
    return draw.randrange(len(output) // 4, max(len(output) // 4 + 1, 3 * len(output) // 4))


def _others(draw: random.Random, count: int) -> Tokens:
    return [draw.choice(WORDS) for _ in range(count)]


def _spliced(gone: int, new: int) -> Callable[[Tokens, Tokens, random.Random], Tokens]:
    """The output with `gone` tokens in the middle replaced by `new` others."""

    def splice(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
        i = _middle(output, draw)
        return output[:i] + _others(draw, new) + output[i + gone :]

    return splice


def _block_moved(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    i = _middle(output, draw)
    rest = output[:i] + output[i + 6 :]
    return rest[: i // 2] + output[i : i + 6] + rest[i // 2 :]


def _out_of_order(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    lines = [output[i : i + 5] for i in range(0, len(output), 5)]
    draw.shuffle(lines)
    return [token for line in lines for token in line]


def _periodic(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    """Begins like the output again and again, and goes on differently each time: many places look right."""
    head = output[:3] or _others(draw, 3)
    return [token for _ in range(40) for token in (*head, draw.choice(WORDS))]


def _very_long(prompt: Tokens, output: Tokens, draw: random.Random) -> Tokens:
    """Longer than the model's context."""
    return _others(draw, 100) + output + _others(draw, 2 * MAX_MODEL_LEN)


#: Kind of prediction → the prediction, from prompt and the output that will come.
KINDS: dict[str, Callable[[Tokens, Tokens, random.Random], Tokens | None]] = {
    "none": lambda prompt, output, draw: None,
    "empty": lambda prompt, output, draw: [],
    "verbatim": lambda prompt, output, draw: output,
    "verbatim, longer": lambda prompt, output, draw: output + _others(draw, 30),
    "prefix only": lambda prompt, output, draw: output[: len(output) // 2],
    "one token replaced": _spliced(1, 1),
    "one token inserted": _spliced(0, 1),
    "one token deleted": _spliced(1, 0),
    "block deleted": _spliced(6, 0),
    "block inserted": _spliced(0, 12),
    "block moved": _block_moved,
    "unrelated": lambda prompt, output, draw: _others(draw, 60),
    "repeated tokens": lambda prompt, output, draw: output[:1] * 80,
    "prompt copied": lambda prompt, output, draw: prompt,
    "hostile periodic": _periodic,
    "lines out of order": _out_of_order,
    "very long": _very_long,
}
