"""Where a token occurs: in a prediction, indexed once, and in the request's own growing context."""

from .build import build_index
from .reference import bucket_of, insert_recent, match_lengths, nearest, recent_ends

__all__ = ["bucket_of", "build_index", "insert_recent", "match_lengths", "nearest", "recent_ends"]
