"""Errors that say what to do about them."""

from __future__ import annotations


class MissingExtraError(ImportError):
    """A feature needs a package that the core of gpu-align does not; the message says how to get it.

    extra: the extra that has it, or "" where `how` says what to do instead.
    """

    def __init__(self, feature: str, package: str, extra: str = "", how: str = "") -> None:
        self.extra = extra
        rest = f'{package}: pip install "gpu-align[{extra}]"' if extra else f"{package}. {how}"
        super().__init__(f"{feature} needs {rest}")
