"""Streamed tool calls and thoughts: vLLM's parsers get a step's tokens one by one. vLLM hands them over as one
delta; most parsers without a parser engine lose or mix something then, with any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

from ..config.in_use import engine_here
from ..seams.guard import Guard
from ..seams.install import Original, seam


class TokenTexts:
    """The text that each token of a stream brings, decoded as vLLM's detokenizer does. tokenizer: of
    `transformers`, fast. prompt: the token ids that the stream continues."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] | None, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer._tokenizer
        self._stream = DecodeStream(ids=list(prompt or ()), skip_special_tokens=skip_special)
        self._pending = ""  # decoded, and held back by vLLM: it may begin a stop string

    def split(self, text: str, token_ids: Sequence[int], finished: bool) -> list[str]:
        """`text` in pieces: what vLLM would have brought with each token alone. Empty where it is another text."""
        held_before, pieces = len(self._pending), []
        for token_id in token_ids:
            pieces.append(self._stream.step(self._tokenizer, token_id) or "")
        decoded = self._pending + "".join(pieces)
        is_theirs = decoded.startswith(text)
        self._pending = decoded[len(text) :] if is_theirs else ""
        if not is_theirs:
            return []
        held = held_before if finished else len(self._pending)
        ends = [min(max(held_before + end - held, 0), len(text)) for end in accumulate(map(len, pieces))]
        return [text[start:end] for start, end in pairwise([0, *ends[:-1], len(text)])]


_guard = Guard("streams", "leaves the tokens of a step together", core=True)
#: Of each parser that has a stream. None: a tokenizer that decodes otherwise.
_texts: WeakKeyDictionary[Any, TokenTexts | None] = WeakKeyDictionary()


@seam("streams.parse_delta")
def parse_delta(
    original: Original,
    self: Any,
    delta_text: str,
    delta_token_ids: Sequence[int],
    request: Any,
    prompt_token_ids: Sequence[int] | None = None,
    *,
    finished: bool,
) -> Any:
    """`DelegatingParser.parse_delta`, token by token, its deltas merged into one. Parsers with an engine take any
    number of tokens; a text that is not that of the tokens stays whole."""
    whole = (delta_text, delta_token_ids, request, prompt_token_ids)
    pieces: list[str] = []
    if not self._engine_based and engine_here() is not None:
        pieces = _guard.run(_split, self, *whole, finished) or []
    if len(pieces) < 2:
        return original(self, *whole, finished=finished)
    last = len(pieces) - 1
    return merged(
        [
            original(self, piece, [token_id], request, prompt_token_ids, finished=finished and place == last)
            for place, (piece, token_id) in enumerate(zip(pieces, delta_token_ids, strict=True))
        ]
    )


def _split(
    parser: Any, text: str, token_ids: Sequence[int], request: Any, prompt: Any, finished: bool
) -> list[str]:
    if parser not in _texts:
        is_fast = hasattr(getattr(parser.model_tokenizer, "_tokenizer", None), "get_added_tokens_decoder")
        given = (parser.model_tokenizer, prompt, bool(request.skip_special_tokens))
        _texts[parser] = TokenTexts(*given) if is_fast else None
    texts = _texts[parser]
    return [] if texts is None else texts.split(text, token_ids, finished)


def merged(deltas: Sequence[Any]) -> Any:
    """One delta of vLLM's that says what these say one after the other; None where none of them says anything."""
    whole, *rest = [delta for delta in deltas if delta is not None] or [None]
    for delta in rest:
        for name in ("content", "reasoning"):
            if (text := getattr(delta, name)) is not None:
                setattr(whole, name, (getattr(whole, name) or "") + text)
        for call in delta.tool_calls or ():
            last, more = whole.tool_calls[-1] if whole.tool_calls else None, call.function
            function = last.function if last is not None and last.index == call.index else None
            if function and more and more.name is None and call.id is None:
                function.arguments = (function.arguments or "") + (more.arguments or "")
            else:
                whole.tool_calls = [*(whole.tool_calls or ()), call]
    return whole
