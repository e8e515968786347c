"""One line of a log, whatever a request id or an error message holds."""

from __future__ import annotations

#: Characters that are shown of an id, and of an error message.
_LONGEST_ID, _LONGEST_MESSAGE = 100, 400


def shown_id(req_id: object) -> str:
    """A request id for a log line: an id that a client may have chosen cannot break the line or fill the log.

    Characters that do not print (control characters, line separators, directional marks, lone surrogates) become
    escapes, and backslashes are doubled; what is longer than 100 characters ends in "…" and its length.
    """
    return _one_line(str(req_id).replace("\\", "\\\\"), _LONGEST_ID)


def shown_error(error: BaseException) -> str:
    """`Type: message` of an exception in one line, up to 400 characters of the message."""
    try:
        message = str(error)
    except Exception:  # a __str__ of somebody else's
        message = ""
    return f"{type(error).__name__}: {_one_line(message, _LONGEST_MESSAGE)}"


def shown_reason(reason: object, longest: int = _LONGEST_MESSAGE) -> str:
    """The message of an error without its type, or what stands for one, in the same way."""
    return _one_line(str(reason), longest)


def _one_line(text: str, longest: int) -> str:
    head = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text[:longest]
    )
    return head if len(text) <= longest else f"{head}… of {len(text)} characters"
