"""Errors that say what to do about them."""

from __future__ import annotations

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
