"""Drafters that others published: the public names of `gpu_align.tools.policies`."""

from .tools.policies import *  # noqa: F403
from .tools.policies import __all__ as __all__
