"""Deterministic replay of known outputs: how good a drafter is, measured without a GPU and without a model.

The known output stands for the model. In each step a policy drafts, the matching prefix is accepted, and one token
of the output follows; `replay` has the loop. From Python::

    from gpu_align import simulate

    records = simulate.read_records(Path("pairs.jsonl.gz"))
    policies = simulate.make_policies(["gpu_align", "prompt_lookup"], records, num_draft_tokens=64)
    results = simulate.simulate(records, policies, num_draft_tokens=64)
    print(results[0].tokens_per_step, results[0].rejected_per_accepted)
"""

from ..inputs import EditError, RecordError
from .bounds import bound, everywhere, perfect_choice
from .policies import (
    NO_PACK,
    OURS,
    SHIPPED_PACK,
    SWEEP,
    config_of,
    import_policy,
    is_import_path,
    make_policies,
    policy_names,
    recipes_for,
    runnable_policy_names,
    setting_name,
    tokenizer_of,
)
from .records import Record, read_records, records_of_files, records_of_git
from .replay import PairResult, PolicyResult, Reliability, replay, simulate
from .report import to_html, to_json
from .tokenizers import load_tokenizer, token_texts

__all__ = [
    "NO_PACK",
    "OURS",
    "SHIPPED_PACK",
    "SWEEP",
    "EditError",
    "PairResult",
    "PolicyResult",
    "Record",
    "RecordError",
    "Reliability",
    "bound",
    "config_of",
    "everywhere",
    "import_policy",
    "is_import_path",
    "load_tokenizer",
    "make_policies",
    "perfect_choice",
    "policy_names",
    "read_records",
    "recipes_for",
    "records_of_files",
    "records_of_git",
    "replay",
    "runnable_policy_names",
    "setting_name",
    "simulate",
    "to_html",
    "to_json",
    "token_texts",
    "tokenizer_of",
]
