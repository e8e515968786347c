"""Single-sequence drafters that others published, as baselines for the simulator.

``POLICIES`` maps the name on the command line to a factory that takes no argument, ``OPTIONAL_POLICIES`` those
that need a package which the core does not, and ``RECIPE_POLICIES`` those whose factory takes the recipes to draft
from. Policies run on plain Python lists and never import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .base import Policy
from .lookup import (
    EarlierResponses,
    InputLookup,
    PromptLookup,
    RecipeLookup,
    SuffixDecoding,
    prompt_lookup_transformers,
    prompt_lookup_vllm,
    prompt_lookup_vllm_v2,
    suffix_decoding_available,
)
from .static_text import Cursor, Myers, OpenAI, StaticText, guess_line_end, line_end_test

if TYPE_CHECKING:
    from ...ops.recipe_lookup import Recipes

#: Command-line name -> a new policy with its published defaults.
POLICIES: dict[str, Callable[[], Policy]] = {
    "cursor": Cursor,
    "openai": OpenAI,
    "static_text": StaticText,
    "myers": Myers,
    "prompt_lookup": PromptLookup,
    "prompt_lookup_vllm": prompt_lookup_vllm,
    "prompt_lookup_vllm_2_5": partial(prompt_lookup_vllm, 2, 5, "prompt_lookup_vllm_2_5"),
    "prompt_lookup_vllm_1_3": partial(prompt_lookup_vllm, 1, 3, "prompt_lookup_vllm_1_3"),
    "prompt_lookup_vllm_v2": prompt_lookup_vllm_v2,
    "prompt_lookup_vllm_v2_1_3": partial(prompt_lookup_vllm_v2, 1, 3, "prompt_lookup_vllm_v2_1_3"),
    "prompt_lookup_transformers": prompt_lookup_transformers,
    "input_lookup_node_llama_cpp": InputLookup,
}

#: The name of suffix decoding -> its spec factor, and the depth of its tree. One of 128 holds a match of 64 tokens
#: and a draft of as many; 24 is vLLM's default.
_SUFFIX_DECODING = {
    "suffix_decoding": (1, 64),
    "suffix_decoding_2": (2, 64),
    "suffix_decoding_4": (4, 64),
    "suffix_decoding_16": (16, 64),
    "suffix_decoding_deep": (1, 128),
    "suffix_decoding_2_deep": (2, 128),
    "suffix_decoding_4_deep": (4, 128),
    "suffix_decoding_16_deep": (16, 128),
    "suffix_decoding_vllm": (1.0, 24),
}

#: The same for policies that use another package; the error that they raise without it says how to get it.
OPTIONAL_POLICIES: dict[str, Callable[[], Policy]] = {
    name: partial(SuffixDecoding, *sizes, name=name) for name, sizes in _SUFFIX_DECODING.items()
}

#: The same for policies that draft from recipes, which are tokens of one tokenizer.
RECIPE_POLICIES: dict[str, Callable[[Recipes], Policy]] = {"recipe_pack": RecipeLookup}

__all__ = [
    "OPTIONAL_POLICIES", "POLICIES", "RECIPE_POLICIES", "Cursor", "EarlierResponses", "InputLookup", "Myers",
    "OpenAI", "Policy", "PromptLookup", "RecipeLookup", "StaticText", "SuffixDecoding", "guess_line_end",
    "line_end_test", "prompt_lookup_transformers", "prompt_lookup_vllm", "prompt_lookup_vllm_v2",
    "suffix_decoding_available",
]  # fmt: skip
