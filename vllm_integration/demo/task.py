"""The edit that the demo asks for: the file before and after it, what is asked for, and the requests."""

from __future__ import annotations

import json
from pathlib import Path

FILE_NAME = "garden.py"
ORIGINAL, EDITED = (
    (Path(__file__).parent / "assets" / f"garden.{which}.txt").read_text(encoding="utf-8")
    for which in ("before", "after")
)

INSTRUCTIONS = [
    "change the constant DRY to 0.35",
    "delete the method export, the old controller is gone",
    "rename the method pick to driest",
    "after draw, insert a method days_left(self, daily) into Tank",
    "print the days left at the end of main",
]
_NUMBERED = "\n".join(f"{number}. {text}" for number, text in enumerate(INSTRUCTIONS, start=1))
_REQUEST = f"Here is {FILE_NAME}:\n\n{ORIGINAL}\nEdit it:\n{_NUMBERED}\n\n"
PROMPT = f"{_REQUEST}Answer with the whole edited file and nothing else: no Markdown fence, no explanation."
MESSAGES = [{"role": "user", "content": PROMPT}]

#: The same edit as an agent writes it: the text in a JSON string, whose tokens the prompt does not hold.
CALL_PROMPT = f"{_REQUEST}Answer with a JSON call of write_file(path, content) and nothing else."
CALL = json.dumps({"name": "write_file", "arguments": {"path": FILE_NAME, "content": EDITED}})
CALL_MESSAGES = [{"role": "user", "content": CALL_PROMPT}]
#: Requests for the call bring the tool: its name and keys are drafted from it.
_PARAMETERS = {"type": "object", "properties": {key: {"type": "string"} for key in ("path", "content")}}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": _PARAMETERS}}]
