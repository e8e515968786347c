"""Single-sequence drafters that others published, as baselines for the simulator.

``POLICIES`` maps the name on the command line to a factory that takes no argument. Policies run on plain
Python lists and never import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_align.policies.base import Policy
from gpu_align.policies.cursor import Cursor
from gpu_align.policies.input_lookup import InputLookup
from gpu_align.policies.myers import Myers
from gpu_align.policies.openai import OpenAI
from gpu_align.policies.prompt_lookup import (
    PromptLookup,
    prompt_lookup_transformers,
    prompt_lookup_vllm,
    prompt_lookup_vllm_v2,
)
from gpu_align.policies.static_text import StaticText, guess_line_end, line_end_test

#: Command-line name -> a new policy with its published defaults.
POLICIES: dict[str, Callable[[], Policy]] = {
    "cursor": Cursor,
    "openai": OpenAI,
    "static_text": StaticText,
    "myers": Myers,
    "prompt_lookup": PromptLookup,
    "prompt_lookup_vllm": prompt_lookup_vllm,
    "prompt_lookup_vllm_v2": prompt_lookup_vllm_v2,
    "prompt_lookup_transformers": prompt_lookup_transformers,
    "input_lookup_node_llama_cpp": InputLookup,
}

__all__ = [
    "POLICIES",
    "Cursor",
    "InputLookup",
    "Myers",
    "OpenAI",
    "Policy",
    "PromptLookup",
    "StaticText",
    "guess_line_end",
    "line_end_test",
    "prompt_lookup_transformers",
    "prompt_lookup_vllm",
    "prompt_lookup_vllm_v2",
]
