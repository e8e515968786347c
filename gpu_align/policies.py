"""Drafters that others published: the public name of `gpu_align.tools.policies`, which it is."""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tools.policies import *  # noqa: F403

# By name: the core imports no tool.
sys.modules[__name__] = importlib.import_module("gpu_align.tools.policies")
