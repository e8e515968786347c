"""Keeps a JSON document up to date: each event is sent with the state, and the old state is the prediction.

::

    python docs/examples/json_state.py state.json "The kettle was switched on" "Anna came home"

The answer is the whole new state, in the form of a JSON schema that is made of the old state, so that no key is
lost or added. Most of it does not change from one event to the next. The environment names the server
(`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MODEL`); `EXTRA_BODY` is JSON that is added to each request. Needs
`pip install openai`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

SYSTEM = "You keep a JSON state. Answer with the whole new state, in the layout of the old one."
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema_of(value: Any) -> dict[str, Any]:
    """A JSON schema of all states with the keys and types of this one. Lists may change in length."""
    if isinstance(value, dict):
        members = {key: schema_of(member) for key, member in value.items()}
        return {"type": "object", "properties": members, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": TYPES[type(value)]}


def updated(client: OpenAI, state: Any, event: str) -> Any:
    """The state after an event. Raises `ValueError` for an answer that is no whole state."""
    text = json.dumps(state, ensure_ascii=False)  # what the model reads, writes and is predicted to write
    answer = client.chat.completions.create(
        model=os.environ.get("MODEL") or client.models.list().data[0].id,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Event: {event}\nState: {text}"},
        ],
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema_of(state)}},
        prediction={"type": "content", "content": text},
        extra_body=json.loads(os.environ.get("EXTRA_BODY", "{}")),
    )
    details = answer.usage and answer.usage.completion_tokens_details
    accepted = details and details.accepted_prediction_tokens
    print(f"{event}: {answer.usage and answer.usage.completion_tokens} tokens, {accepted=}", file=sys.stderr)
    if answer.choices[0].finish_reason != "stop":
        raise ValueError(f"the answer is not complete (finish_reason: {answer.choices[0].finish_reason})")
    return json.loads(answer.choices[0].message.content or "")


def main() -> int:
    if len(sys.argv) < 3:
        print("usage: json_state.py STATE.json EVENT...", file=sys.stderr)
        return 2
    path, events = Path(sys.argv[1]), sys.argv[2:]
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        for event in events:
            state = updated(client, state, event)
            path.write_text(json.dumps(state, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError, OpenAIError) as error:
        print(f"error: {path} has the state before this event: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
