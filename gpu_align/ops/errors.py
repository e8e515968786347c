"""Errors that say what to do about them, and checks of single arguments. It imports nothing but the standard
library: the command line loads it before torch."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

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


def check_type(name: str, value: object, kind: Any, expected: str, advice: str = "") -> None:
    """Raise TypeError if the value is not of this kind, a type or a union of some. A bool is no number."""
    if not isinstance(value, kind) or (kind is Real and isinstance(value, bool)):
        raise TypeError(f"{name}: expected {expected}, found {type(value).__name__}{advice}")


def check_probability(name: str, value: float) -> None:
    """Raise TypeError or ValueError if the value is no number from 0 to 1."""
    check_type(name, value, Real, "a number")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected 0 <= p <= 1, found {value}")


def check_temperature(value: float) -> None:
    """Raise TypeError or ValueError if the value is no finite number of 0 or more."""
    if type(value) is not float:
        check_type("temperature", value, Real, "a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"temperature: expected a finite number, 0 or more, found {value}")


def check_int(name: str, value: object, low: int, high: int | None = None, domain: str = "") -> int:
    """Return `value` as an int if it is an integer (no bool) from `low` to `high`; raise TypeError or ValueError
    otherwise.

    high: None is any number. domain: how the message writes the domain, if not as "low to high".
    """
    if type(value) is int:  # asked first: the other question takes ten times as long
        found = value
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    else:
        found = int(value)
    if found < low or (high is not None and found > high):
        most = "or more" if high is None else f"to {high}"
        raise ValueError(f"{name}: expected {domain or f'{low} {most}'}, found {value}")
    return found
