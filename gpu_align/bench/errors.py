"""The one error that ends a run."""

from __future__ import annotations


class BenchError(Exception):
    """The run cannot begin or go on. The message is one line and names the value that is wrong.

    Attributes:
        log: the last lines of a server's log, "" where no server of ours died.
        usage: whether an option is wrong, so that nothing was measured.
    """

    def __init__(self, message: str, *, log: str = "", usage: bool = False) -> None:
        self.log = log
        self.usage = usage
        super().__init__(" ".join(message.split()))
