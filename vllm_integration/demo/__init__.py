"""`make demo`: `bench` on a model that it trains. Importing this package imports neither torch nor vLLM."""

from .run import run_demo

__all__ = ["run_demo"]
