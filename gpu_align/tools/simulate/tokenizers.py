"""Text to token ids and back, for records that carry text and for pages that show tokens."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from ...ops.errors import MissingExtraError
from .. import inputs

#: GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others sit from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_LEVEL |= {chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class TextTokenizer(Protocol):
    """The part of a tokenizer that simulator, corpus and pages use."""

    name: str  #: or path that it was loaded by
    vocab_size: int  #: ids are in ``[0, vocab_size)``

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without beginning-of-text or other special tokens added."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for, maybe a part of a character; the name of a special one (``<s>``)."""

    def render(self, messages: list[dict[str, Any]], ends_open: bool) -> str:
        """The text of a conversation by its chat template; ends_open: up to the next answer."""


class TekkenTokenizer:
    """Tekken, from the tokenizer file that ships inside the mistral-common package."""

    def __init__(self) -> None:
        try:
            import mistral_common
            from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError as error:
            raise MissingExtraError("the tekken tokenizer", "mistral-common", "transformers") from error
        self.name = "tekken"
        folder = Path(mistral_common.__file__).parent / "data"
        files = sorted(folder.glob("tekken_*.json"))  # named by their dates
        if not files:
            raise FileNotFoundError(f"no tekken_*.json in {folder}; mistral-common 1.8 and 1.9 have one")
        self._tekken = Tekkenizer.from_file(files[-1])
        self._keep = SpecialTokenPolicy.KEEP
        self.vocab_size: int = self._tekken.n_words

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tekken.encode(text, bos=False, eos=False)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        piece: bytes = self._tekken.id_to_byte_piece(token_id, self._keep)
        return piece

    def render(self, messages: list[dict[str, Any]], ends_open: bool) -> str:
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        return "".join(f"[TOOL_CALLS]{call['name']}{json.dumps(call['arguments'])}" for call in calls)


class TransformersTokenizer:
    """Any tokenizer that ``transformers.AutoTokenizer`` loads, by hub name or local folder."""

    def __init__(self, name_or_path: str) -> None:
        path = Path(name_or_path)
        is_path = path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1
        if is_path and not path.is_dir():
            raise ValueError(_unreadable(name_or_path, "no such folder"))
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError(f"tokenizer {name_or_path!r}", "transformers", "transformers") from error
        self.name = name_or_path
        load: Any = partial(AutoTokenizer.from_pretrained, name_or_path, trust_remote_code=inputs.trusts_code)
        try:
            # Loading warns on stderr about a missing PyTorch or model, which a tokenizer does not need.
            with contextlib.redirect_stderr(io.StringIO()):
                try:
                    self._tokenizer = load(local_files_only=True)
                except Exception:  # not in the cache: from the hub
                    if path.is_dir():
                        raise
                    self._tokenizer = load()
        except Exception as error:  # a broken tokenizer file fails in many ways
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            if "trust_remote_code" in str(error) and not inputs.trusts_code:
                why = "it is loaded by code of its own, which runs with --trust-remote-code only"
            raise ValueError(_unreadable(name_or_path, why)) from error
        self.vocab_size = len(self._tokenizer)
        self._special = set(self._tokenizer.all_special_ids)
        # Pieces are written in GPT-2's byte alphabet where a newline becomes this.
        pieces = self._tokenizer.convert_ids_to_tokens(self.encode("a\nb"))
        self._byte_level = any("Ċ" in piece for piece in pieces)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render(self, messages: list[dict[str, Any]], ends_open: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ends_open)
        )

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id not in self._special and self._byte_level:
            if all(character in _BYTE_LEVEL for character in token):
                return bytes(_BYTE_LEVEL[character] for character in token)
        elif token_id not in self._special:
            # SentencePiece: "▁" is a space, "<0x0A>" one byte.
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                with contextlib.suppress(ValueError):
                    return bytes([int(token[3:5], 16)])
            token = token.replace("▁", " ")
        return str(token).encode()


def _unreadable(name: str, why: str) -> str:
    expected = "a folder or a hub name that transformers can load, or 'tekken'"
    return f"tokenizer: expected {expected}, got {name!r} ({why})"


@lru_cache(maxsize=4)
def load_tokenizer(name_or_path: str) -> TextTokenizer:
    """``"tekken"`` → `TekkenTokenizer`, anything else → `TransformersTokenizer`. MissingExtraError: its package is
    not installed. ValueError: transformers cannot load it."""
    return TekkenTokenizer() if name_or_path == "tekken" else TransformersTokenizer(name_or_path)


def token_texts(tokenizer: TextTokenizer, ids: Iterable[int]) -> list[str]:
    """One string a token whose concatenation is the decoded text; U+FFFD for bytes that never become UTF-8.

    A character whose bytes span several tokens is shown whole at the token that completes it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [
        decoder.decode(tokenizer.token_bytes(i) if 0 <= i < tokenizer.vocab_size else b"\xff") for i in ids
    ]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def line_end_test(tokenizer: TextTokenizer) -> Callable[[int], bool]:
    """Whether the text of a token, at least 0, contains a line feed: after such a one a line is complete."""
    return lambda token_id: token_id < tokenizer.vocab_size and b"\n" in tokenizer.token_bytes(token_id)
