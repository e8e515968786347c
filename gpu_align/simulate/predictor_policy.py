"""A `TokenPredictor` as a policy of the simulator, and either of them by its import path."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

from gpu_align.policies.base import Policy
from gpu_align.predictors.base import TokenPredictor
from gpu_align.predictors.loop import PredictorLoop


class PredictorPolicy(Policy):
    """Replays a predictor. Its input tokens are the prompt, then the prediction; its state begins with the prompt.

    An error of the predictor is raised: a figure without its drafts would mislead.

    Args:
        predictor: what drafts; it is reset for every record.
        name: in reports.
    """

    def __init__(self, predictor: TokenPredictor, name: str) -> None:
        self.name = name
        self._predictor = predictor
        self._loop: PredictorLoop | None = None

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        if self._loop is not None:
            self._loop.stop()
        self._loop = PredictorLoop(
            self._predictor, num_draft_tokens=num_draft_tokens, strict=True, timeout=None
        )
        self._loop.start(prompt, prediction)

    def propose(self) -> list[int]:
        return self._started().draft()

    def extend(self, tokens: Sequence[int]) -> None:
        self._started().push(tokens)

    def _started(self) -> PredictorLoop:
        if self._loop is None:
            raise RuntimeError(f"policy {self.name!r}: start() must be called before propose() and extend()")
        return self._loop


def is_import_path(name: str) -> bool:
    """Whether it names a class of somebody's module and not a policy of the library."""
    return ":" in name


def import_policy(path: str) -> Policy:
    """The policy at ``module:name`` or ``module:name?argument=value&...``.

    What has this name, a class or a function, is called with the arguments and returns a `Policy` or a
    `TokenPredictor`. A value is a Python literal where it reads as one, else text:
    ``?max_tokens=8&model=org/name``.

    Raises:
        ValueError: no such module or name, arguments that it does not take, or another result.
    """
    target, _, query = path.partition("?")
    module_name, _, name = target.partition(":")
    try:
        made: Any = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"policy {path!r}: cannot import {module_name!r}: {error}") from error
    for part in name.split("."):
        made = getattr(made, part, None)
    if not callable(made):
        raise ValueError(f"policy {path!r}: expected a class or a function in {module_name!r}")
    try:
        arguments = {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        policy = made(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {path!r}: {error}") from error
    if isinstance(policy, TokenPredictor):
        return PredictorPolicy(policy, path)
    if isinstance(policy, Policy):
        policy.name = path
        return policy
    raise ValueError(f"policy {path!r}: expected a TokenPredictor or a Policy, found {type(policy).__name__}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
