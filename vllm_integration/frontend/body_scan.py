"""Reads a request body as it arrives, before it is parsed: how large it is, and whether it brings a prediction.

    scan = BodyScan()
    for chunk in body:
        scan.feed(chunk)
    scan.brings_prediction, scan.size, scan.items

Everything is done by functions of C on whole chunks: a megabyte of text takes two to three milliseconds, a
megabyte of quotation marks ten times as long.
"""

from __future__ import annotations

import re

from vllm_integration.wire import prediction as wire

#: Keys that bring a prediction.
KEYS = (b"prediction", wire.KEY.encode())
#: So many plain values of arrays and objects cost as much as one key, array or object.
VALUES_PER_ITEM = 4

_WHITE_SPACE = b" \t\n\r"


def _with_escapes(key: bytes) -> bytes:
    """A pattern of all that JSON reads as this key: each letter may be written as backslash, u and four digits."""
    return b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in key)


_KEY = re.compile(rb'"(?:%s)"[ \t\n\r]*:' % b"|".join(map(_with_escapes, KEYS)))
#: The longest of these: six bytes a letter, and the quotation marks.
_LONGEST = 6 * max(map(len, KEYS)) + 2


class BodyScan:
    """A scan of one body of JSON.

    Attributes:
        size: bytes so far.
        brings_prediction: whether one of `KEYS` is a key of an object in it, however it is written.

    A quotation mark that no backslash precedes begins or ends a string, also where a chunk ends: what lies in
    strings is no structure. JSON may also be UTF-16 or UTF-32, which then have bytes of zero, as no UTF-8 of JSON
    has; what is structure is not told apart there, and all is counted.
    """

    def __init__(self) -> None:
        self.size = 0
        self.brings_prediction = False
        self._structures = 0
        self._commas = 0
        self._in_string = False
        self._is_wide = False
        self._tail = b""  # of what was searched for a key, which may go on in the next chunk
        self._backslash = b""  # the last byte, where what it escapes has not arrived

    @property
    def items(self) -> int:
        """Keys, arrays and objects so far, and a quarter of the commas between their values."""
        return self._structures + self._commas // VALUES_PER_ITEM

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        self.size += len(chunk)
        if self._is_wide or b"\0" in chunk:
            self._is_wide = True
            chunk = structure = chunk.replace(b"\0", b"")
        else:
            structure = self._outside_strings(chunk)
        if not self.brings_prediction:
            self._look_for_key(chunk)
        self._structures += structure.count(b"{") + structure.count(b"[") + structure.count(b":")
        self._commas += structure.count(b",")

    def _look_for_key(self, chunk: bytes) -> None:
        window = self._tail + chunk
        self.brings_prediction = _KEY.search(window) is not None
        # Any amount of white space may lie between a key and its colon.
        self._tail = window.rstrip(_WHITE_SPACE)[-_LONGEST:]

    def _outside_strings(self, chunk: bytes) -> bytes:
        chunk = self._backslash + chunk
        end = len(chunk) - (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
        self._backslash = chunk[end:]
        parts = chunk[:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = parts[self._in_string :: 2]
        self._in_string ^= len(parts) % 2 == 0  # an odd number of quotation marks
        return b"".join(outside)
