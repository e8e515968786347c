"""What a server is and does: one INFO line at its start, `gpu_align_info`, and `GET /gpu_align/status`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import gpu_align

from ..config.in_use import EngineFacts, engine_here
from ..config.settings import Settings, packs_of
from ..seams.install import install, is_installed, off_reason, shown_reason
from . import metrics

logger = logging.getLogger("vllm.gpu_align")

PATH = "/gpu_align/status"

#: Where the field is read, and the group of seams that reads it.
ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "batch",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
#: The `off_reason` where it is not this process that is off.
_WORKER_OFF = "a worker has turned drafting off: its ERROR line in the server's log says why"
#: Digits of a pack's hash that the log and the metric show.
_HASH = len("sha256:") + 12


@dataclass(frozen=True)
class Server:
    """What does not change while a server runs.

    vllm: its version. runner: "V1" or "V2". num_draft_tokens: K. endpoints: where `prediction` is read.
    recipes: the packs as configured, by name with their hash, which is None where a pack cannot be read here.
    memory_tokens: of the response memory. settings: the `GPU_ALIGN_*` variables that are not at their defaults.
    """

    vllm: str
    runner: str
    num_draft_tokens: int
    endpoints: tuple[str, ...]
    recipes: tuple[tuple[str, str | None], ...]
    memory_tokens: int
    settings: dict[str, Any]

    @classmethod
    def here(cls, engine: EngineFacts, supported_tasks: Sequence[str]) -> Server:
        """The server of this process. Reads the packs, which may take a second."""
        settings = Settings.from_env()
        generates = "generate" in supported_tasks
        return cls(
            vllm=_version_of_vllm(),
            runner=engine.runner,
            num_draft_tokens=engine.num_draft_tokens,
            endpoints=tuple(path for path, group in ENDPOINTS.items() if generates and is_installed(group)),
            recipes=packs_of(settings),
            memory_tokens=settings.memory_tokens,
            settings=settings.changed(),
        )

    def line(self) -> str:
        """One line for the log."""
        packs = ", ".join(f"{name} {(found or 'not read')[:_HASH]}" for name, found in self.recipes)
        memory = (
            f"response memory of {self.memory_tokens} tokens" if self.memory_tokens else "no response memory"
        )
        changed = " ".join(
            f"{name}={int(value) if isinstance(value, bool) else value}"
            for name, value in self.settings.items()
        )
        return (
            f"gpu_align {gpu_align.__version__} drafts on vLLM {self.vllm}, {self.runner} model runner, "
            f"K={self.num_draft_tokens}; `prediction` on {', '.join(self.endpoints) or 'no endpoint'}; "
            f"recipes: {packs or 'off'}; {memory}; settings: {changed or 'defaults'}"
        )

    def labels(self) -> dict[str, str]:
        """Of `gpu_align_info`."""
        recipes = ",".join(
            f"{name}@{(found or 'sha256:')[7:_HASH]}".rstrip("@") for name, found in self.recipes
        )
        return {
            "version": gpu_align.__version__,
            "vllm": self.vllm,
            "runner": self.runner,
            "num_draft_tokens": str(self.num_draft_tokens),
            "recipes": recipes,
        }

    def status(self) -> dict[str, Any]:
        """What `GET /gpu_align/status` answers."""
        reason = off_reason() or (None if metrics.enabled() else _WORKER_OFF)
        return {
            "version": gpu_align.__version__,
            "vllm": self.vllm,
            "on": reason is None,
            "off_reason": reason,
            "runner": self.runner,
            "num_draft_tokens": self.num_draft_tokens,
            "endpoints": list(self.endpoints),
            "recipes": [{"name": name, "hash": found} for name, found in self.recipes],
            "memory_tokens": self.memory_tokens,
            "settings": self.settings,
            "counters": metrics.read(),
        }


def _version_of_vllm() -> str:
    try:
        import vllm

        return str(vllm.__version__)
    except (ImportError, AttributeError):
        return version("vllm")


def announce(args: Any, app: Any, supported_tasks: Sequence[str]) -> None:
    """Say what the server of this process is, where it drafts from predictions, and give `app` the route.

    args: of the command line, for its API keys. Without the names of vLLM that check a key there is no route.
    """
    engine = engine_here()
    if engine is None:
        return
    server = Server.here(engine, supported_tasks)
    metrics.set_info(**server.labels())
    metrics.set_enabled(off_reason() is None)
    if off_reason() is None:
        logger.info("%s", shown_reason(server.line(), longest=2000))
    if reason := install("status"):
        logger.warning("gpu_align serves no %s: %s", PATH, reason)
        return
    app.router.add_route(PATH, _route(server, _keys_of(args)), methods=["GET"], include_in_schema=False)


def _keys_of(args: Any) -> list[str]:
    """The server's API keys, from where vLLM takes them."""
    return [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


def _route(server: Server, keys: list[str]) -> Any:
    """A handler, which Starlette runs in a thread. vLLM checks keys on some prefixes alone, so it is done here."""
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    checks = AuthenticationMiddleware(None, keys) if keys else None

    def answer(request: Any) -> Any:
        if checks is not None and not checks.verify_token(request.headers):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return JSONResponse(server.status())

    return answer
