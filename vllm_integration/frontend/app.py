"""What vLLM's HTTP application gets from us: middleware, a route, a log without predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_integration.frontend import redaction, status
from vllm_integration.frontend.body_limit import BodyLimit
from vllm_integration.frontend.faults import unless_it_fails
from vllm_integration.frontend.unsupported import RefusedPredictions
from vllm_integration.seams.install import seam


@seam("app.init_entrypoints_middleware")
def init_entrypoints_middleware(
    original: Callable[..., Any],
    args: Any,
    app: Any,
    supported_tasks: Sequence[str],
    *more: Any,
    **kwargs: Any,
) -> Any:
    """`init_entrypoints_middleware`, with ours as the innermost: behind authentication, before parsing.

    An HTTP server starts here, so this is also where it says what it is, and where its log is kept free of
    predictions.
    """
    from starlette.middleware import Middleware

    unless_it_fails("keep predictions out of tracebacks", redaction.install)
    app.user_middleware += [Middleware(BodyLimit), Middleware(RefusedPredictions)]
    unless_it_fails("say what it is", status.announce, args, app, supported_tasks)
    return original(args, app, supported_tasks, *more, **kwargs)
