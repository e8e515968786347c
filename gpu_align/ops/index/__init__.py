"""Where a token occurs: in a prediction, indexed once, and in the request's own growing context."""

from .build import build_index

__all__ = ["build_index"]
