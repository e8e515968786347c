"""A server's facts and counters: one INFO line at its start, `gpu_align_info`, and `GET /gpu_align/status`, which
is vLLM's `vllm.endpoint_plugins` entry: vLLM loads it where `VLLM_PLUGINS` names gpu_align."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import gpu_align

from ..config.in_use import drafts_predictions, engine_here, inner_tokens
from ..config.settings import SHOWN_HASH, Settings, packs_of
from ..seams.guard import logger, shown_reason
from ..seams.install import off_reason
from . import metrics
from .prediction import ENDPOINTS

PATH = "/gpu_align/status"


def server_facts(vllm_config: Any) -> dict[str, Any]:
    """The facts that do not change while the server runs, as docs/metrics.md shows them. Reads the packs, which
    may take a second; one that cannot be read here has no hash."""
    import vllm

    settings, speculative = Settings.of(vllm_config), vllm_config.speculative_config
    inner = inner_tokens(vllm_config)
    return {
        "version": gpu_align.__version__,
        "vllm": str(vllm.__version__),
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "num_draft_tokens": int(speculative.num_speculative_tokens),
        "drafter": f"{speculative.method}, {inner} tokens" if inner else None,
        "max_num_seqs": int(vllm_config.scheduler_config.max_num_seqs),
        "endpoints": list(ENDPOINTS[:-1]),
        "recipes": [{"name": name, "hash": found} for name, found in packs_of(settings)],
        "memory_tokens": settings.memory_tokens,
        "settings": settings.changed(),
    }


def _line(facts: Mapping[str, Any]) -> str:
    """One line for the log."""
    packs = [f"{pack['name']} {(pack['hash'] or 'not read')[:SHOWN_HASH]}" for pack in facts["recipes"]]
    memory = f"response memory of {facts['memory_tokens']} tokens"
    beside = (facts["drafter"] and f"; other requests by {facts['drafter']}") or ""
    changed = [f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in facts["settings"].items()]
    return (
        f"gpu_align {facts['version']} drafts on vLLM {facts['vllm']}, {facts['runner']} model runner, "
        f"K={facts['num_draft_tokens']}{beside}; `prediction` on {', '.join(facts['endpoints'])}; "
        f"recipes: {', '.join(packs) or 'off'}; "
        f"{memory if facts['memory_tokens'] else 'no response memory'}; "
        f"settings: {' '.join(changed) or 'defaults'}"
    )


def announce() -> None:
    """Say what the server of this process is, where it drafts from predictions."""
    engine = engine_here()
    if engine is None:
        return
    metrics.create()
    facts = server_facts(engine)
    packs = [f"{pack['name']}@{(pack['hash'] or '')[7:SHOWN_HASH]}".rstrip("@") for pack in facts["recipes"]]
    metrics.set_info(**{**facts, "drafter": facts["drafter"] or "", "recipes": ",".join(packs)})
    metrics.show_faults()
    if off_reason() is None:
        logger.info("%s", shown_reason(_line(facts), longest=2000))


class StatusEndpoint:
    """The route, on a server that drafts from predictions."""

    name = "gpu_align"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        if engine_here() is not None:
            app.router.add_route(PATH, self.answer, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """args: of the command line. vLLM checks its keys on some prefixes alone, so it is done here."""
        self._engine = getattr(engine_client, "vllm_config", None)
        self._keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]

    def answer(self, request: Any) -> Any:
        """Starlette runs it in a thread."""
        from starlette.responses import JSONResponse

        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = [secrets.compare_digest(given.encode(), key.encode()) for key in self._keys]
        if right and not (any(right) and scheme.lower() == "bearer"):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        reason, off = metrics.off_reason(), metrics.all_faults()
        changing = {"on": reason is None, "off_reason": reason, "faults": off}
        facts = server_facts(self._engine) if drafts_predictions(self._engine, even_if_off=True) else {}
        return JSONResponse({**facts, **changing})
