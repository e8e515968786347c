"""The forms of the answer in which a prediction is drafted from, beside its text: views of `gpu_align.views`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gpu_align import views

from ..seams.install import strict
from .conversation import expects_json
from .prediction import FIELD, FieldError, Limits, count_refused, type_name

logger = logging.getLogger("vllm.gpu_align")


def views_for(value: object, text: str, request: Any) -> tuple[str, ...]:
    """Names of the views (`gpu_align.views`) that are drafted from beside the text of a `prediction` field: those
    that it names under `views`, else JSON's where the answer may hold the text as a string of JSON."""
    where, names = f"{FIELD}.views", value.get("views") if isinstance(value, dict) else None
    if names is None:
        return ("json",) if text and _may_answer_in_json(request, text) else ()
    if not isinstance(names, list):
        raise FieldError(f"{where}: expected an array of names, got {type_name(names)}")
    known = ", ".join(views.NAMES)
    if len(names) > len(views.NAMES):
        raise FieldError(
            f"{where}: expected at most {len(views.NAMES)} names, got {len(names)}; they are {known}"
        )
    try:
        views.check_names(where, names)
    except ValueError as error:
        raise FieldError(str(error)) from None
    if names and not text:
        raise FieldError(f"{where}: expected no names with an empty prediction, got some of {known}")
    return tuple(names)


def _may_answer_in_json(request: Any, text: str) -> bool:
    """Where the answer is JSON and no call of a tool, a text that is JSON is the answer itself."""
    is_answer = text.lstrip().startswith(("{", "[")) and not getattr(request, "tools", None)
    return expects_json(request) and not is_answer


async def with_views(
    token_ids: list[int],
    text: str,
    names: Sequence[str],
    limits: Limits,
    tokenize: Callable[[str], Awaitable[list[int]]],
) -> list[int]:
    """The ids of `text`, then those of its views, as far as they are within the limit."""
    try:
        made = await asyncio.to_thread(views.make, text, names)
        for view in made:
            remaining = max(limits.tokens - len(token_ids), 0)
            ids = await tokenize(view[: limits.characters]) if remaining else []
            token_ids = [*token_ids, *ids[:remaining]]
            if not remaining or len(ids) > remaining or len(view) > limits.characters:
                count_refused("view", "truncated" if remaining else "dropped")
    except Exception as error:  # its message might repeat the text
        if strict():
            raise
        count_refused("view", "dropped")
        logger.warning("A prediction is used without its views: %s", type(error).__name__)
    return token_ids
