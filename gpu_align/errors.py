"""Errors that say what to do about them, and the check of an integer argument. It imports nothing but the standard
library: the command line loads it before torch."""

from __future__ import annotations

from numbers import Integral

#: How an extra is installed: no package index has gpu-align yet.
INSTALL = 'pip install ".[{}]" in a checkout'


class MissingExtraError(ImportError):
    """A feature needs a package that the core of gpu-align does not; the message says how to get it.

    extra: the extra that has it, or "" where `how` says what to do instead.
    """

    def __init__(self, feature: str, package: str, extra: str = "", how: str = "") -> None:
        self.extra = extra
        rest = f"{package}: {INSTALL.format(extra)}" if extra else f"{package}. {how}"
        super().__init__(f"{feature} needs {rest}")


def check_int(name: str, value: object, low: int, high: int | None = None, domain: str = "") -> int:
    """Return `value` as an int if it is an integer (no bool) from `low` to `high`; raise TypeError or ValueError
    otherwise.

    high: None is any number. domain: how the message writes the domain, if not as "low to high".
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    found = int(value)
    if found < low or (high is not None and found > high):
        most = "or more" if high is None else f"to {high}"
        raise ValueError(f"{name}: expected {domain or f'{low} {most}'}, found {value}")
    return found
