"""`make demo`: predicted outputs in a real vLLM server, in one command. It is `bench` on a model that it trains.

Importing this package imports neither torch nor vLLM.
"""

from .run import run_demo

__all__ = ["run_demo"]
