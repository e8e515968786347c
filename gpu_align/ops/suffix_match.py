"""The old place of this name, for one release: it is in `ops.index`."""

from .index import build_index

__all__ = ["build_index"]
