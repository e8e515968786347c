"""Slots of an engine's drafter against the requests that hold them, after each step; run inside its process.

    V2Engine(..., after=AUDIT)                      engine.ask("audited") → {"slots": how many, "wrong": in words}

A request's slot has its prompt's length, its text and kind, and shares its text with equal ones of its tenant
alone. A text of earlier answers is made of answers of its tenant. A tenant is a `cache_salt`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

AUDIT = f"import runpy\nrunpy.run_path({str(Path(__file__))!r})['SlotAudit'](self)"
_MOST_SHOWN = 20


class SlotAudit:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.count = 0
        self.kinds: defaultdict[str, int] = defaultdict(int)
        self.wrong: list[str] = []
        #: Tenant → its requests that leave an answer behind; those whose texts are known to be made of answers.
        self.answers: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self.known: set[str] = set()
        scheduler = engine.scheduler
        update = scheduler.update_from_output

        def audited(scheduler_output: Any, output: Any) -> Any:
            self.audit(scheduler_output.num_scheduled_tokens)
            return update(scheduler_output, output)

        scheduler.update_from_output = audited
        engine.audited = lambda: {"slots": self.count, "kinds": self.kinds, "wrong": self.wrong[:_MOST_SHOWN]}

    def audit(self, scheduled: Any) -> None:
        runner = self.engine.runner
        ours = getattr(runner, "speculator", None) or runner.drafter
        places: dict[Any, int] = {}
        for name in scheduled:
            request = self.engine.scheduler.requests.get(name)
            if request is None:
                continue
            if (request.sampling_params.extra_args or {}).get("memory") is not False:
                self.answers[request.cache_salt][name] = request
            slot = self.slot_of(runner, ours, name)
            if slot is not None:
                self.count += 1
                self.wrong += [
                    f"{name}, slot {slot}: {wrong}" for wrong in self.differs(ours, slot, request, places)
                ]
        bases = list(places.values())
        if len(set(bases)) < len(bases):
            self.wrong.append(f"different texts in one place: {places}"[:500])

    @staticmethod
    def slot_of(runner: Any, ours: Any, name: str) -> int | None:
        if hasattr(ours, "slots"):
            slot: int | None = ours.slots.get(name)
            return slot
        slot = runner.req_states.req_id_to_index.get(name)
        return slot if slot is not None and ours._occupied[slot] else None

    def differs(self, ours: Any, slot: int, request: Any, places: dict[Any, int]) -> list[str]:
        from gpu_align.drafter.admission import rules_of
        from gpu_align.ops import layout as c
        from vllm_integration.wire import request as wire

        ours.drafter.flush()
        meta = ours.drafter._state.slot_meta[slot].tolist()
        base, length = meta[c.PREDICTION_BASE], meta[c.PREDICTION_LEN]
        given = wire.brought_by(request.sampling_params)
        told = wire.decode_token_ids(given.token_ids).tolist()[: ours.capacity] if given else []
        wrong = []
        if meta[c.OUTPUT_START] != request.num_prompt_tokens:
            wrong.append(f"its output begins at {meta[c.OUTPUT_START]}, not {request.num_prompt_tokens}")
        if not length:  # it brings none, or there was no room
            return wrong
        held = ours.drafter._state.prediction_tokens[base : base + length].tolist()
        temperature = getattr(request.sampling_params, "temperature", 0.0)
        kind = rules_of(given.kind, np.array(told, dtype=np.int64), temperature)
        held_kind = c.unpack_rules(meta[c.TEXT_RULES])
        self.kinds["texts of earlier answers" if given.kind else "predictions"] += 1
        if held != told or held_kind != kind:
            wrong.append(f"a text of kind {held_kind}, {length} tokens, not kind {kind}, {len(told)}")
        if places.setdefault((tuple(told), request.cache_salt), base) != base:
            wrong.append("it does not share its text")
        if given.kind and request.request_id not in self.known and not self.made_of_own(told, request):
            wrong.append("its text is not made of answers of its tenant")
        return wrong

    def made_of_own(self, text: list[int], request: Any) -> bool:
        """Whether the text is answers of the request's tenant, one behind the other."""
        self.known.add(request.request_id)
        of_tenant = self.answers[request.cache_salt].items()
        answers = [list(each.output_token_ids) for name, each in of_tenant if name != request.request_id]
        ends, seen = [0], {0}
        while ends:
            start = ends.pop()
            for answer in answers:
                end = start + len(answer)
                if answer and end not in seen and text[start:end] == answer:
                    seen.add(end)
                    ends.append(end)
        return len(text) in seen
