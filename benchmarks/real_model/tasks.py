"""The tasks of ``tasks.jsonl``: 17 kinds of chat with a worked example each, three inputs a kind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

#: A kind a line: instruction, example (input and answer), inputs, predictions where these are not the inputs, and
#: `teacher`: further inputs, five to learn a recipe pack from and five to replay.
KINDS: dict[str, dict[str, Any]] = {
    (row := json.loads(line))["kind"]: row
    for line in Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
}
Chat = list[dict[str, str]]


class Task(NamedTuple):
    """One request, and the prediction that its client would send."""

    id: str
    messages: Chat
    prediction: str

    @property
    def half(self) -> str:
        """``unseen``: no setting may be chosen by it. By the hash of `id`."""
        return ("seen", "unseen")[hashlib.sha256(self.id.encode()).digest()[0] & 1]


def tasks() -> list[Task]:
    """All of them, in the order of the file."""
    return [
        Task(f"{kind} {i + 1}", chat(kind, text), of.get("predictions", of["inputs"])[i])
        for kind, of in KINDS.items()
        for i, text in enumerate(of["inputs"])
    ]


def chat(kind: str, text: str) -> Chat:
    """The example of a kind, then the same request for another text."""
    of = KINDS[kind]
    question, answer = of["example"]
    said = (f"{of['instruction']}\n\n{question}", answer, f"{of['instruction']}\n\n{text}")
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]
