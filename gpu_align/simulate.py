"""Deterministic replay of known outputs: the public names of `gpu_align.tools.simulate.replay`."""

from .tools.simulate.replay import *  # noqa: F403
from .tools.simulate.replay import __all__ as __all__
