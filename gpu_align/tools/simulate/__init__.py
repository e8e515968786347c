"""Deterministic replay of known outputs: how good a drafter is, measured without a GPU and without a model.

The known output stands for the model. In each step a policy drafts, the matching prefix is accepted, and one token
of the output follows; `replay` has the loop.
"""

from ..inputs import EditError, RecordError
from .policies import (
    NO_PACK,
    SWEEP,
    import_policy,
    make_policies,
    policy_names,
    recipes_for,
    runnable_policy_names,
    setting_name,
    tokenizer_of,
)
from .records import Record, read_records, records_of_files, records_of_git
from .replay import PairResult, PolicyResult, replay, simulate
from .report import to_html, to_json
from .tokenizers import load_tokenizer, token_texts

__all__ = [
    "NO_PACK", "SWEEP", "EditError", "PairResult", "PolicyResult", "Record", "RecordError", "import_policy",
    "load_tokenizer", "make_policies", "policy_names", "read_records", "recipes_for", "records_of_files",
    "records_of_git", "replay", "runnable_policy_names", "setting_name", "simulate", "to_html", "to_json",
    "token_texts", "tokenizer_of",
]  # fmt: skip
