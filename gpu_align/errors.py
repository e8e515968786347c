"""Errors that say what to do about them."""

from __future__ import annotations


class MissingExtraError(ImportError):
    """A feature needs a package that the core of gpu-align does not; the message says how to get it."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f'{feature} needs {package}: pip install "gpu-align[{extra}]"')
