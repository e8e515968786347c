"""A limit on the draft tokens of a whole batch; see README.md here."""

from .launch import limit_drafts_inplace

__all__ = ["limit_drafts_inplace"]
