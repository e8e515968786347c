"""An agent that edits one file: it asks for the new file with the old one as the prediction, checks it, writes it.

::

    python docs/examples/code_edit_agent.py service.py "Rename get_user to fetch_user" [--attempts 3] [--dry-run]

The environment names the server (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MODEL`); `EXTRA_BODY` is JSON that is added
to each request. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

SYSTEM = "You edit files. Answer with the whole new file and nothing else: no fence, no comment."


def problem_of(path: Path, text: str, finish_reason: str) -> str | None:
    """Why an answer cannot replace the file, or None. A real agent would run the tests of the project here."""
    if finish_reason != "stop":
        return f"the answer is not complete (finish_reason: {finish_reason})"
    if path.suffix == ".py":
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            return f"the answer is no Python: {error}"
    return None


def report(usage: Any, attempt: int) -> None:
    """The tokens that the prediction saved, as the server counts them. Others leave the fields out."""
    found = usage.completion_tokens_details
    accepted = found and found.accepted_prediction_tokens
    rejected = found and found.rejected_prediction_tokens
    print(f"attempt {attempt}: {usage.completion_tokens} tokens, {accepted=} {rejected=}", file=sys.stderr)


def edit(client: OpenAI, path: Path, old: str, instruction: str, attempts: int) -> str:
    """The new text of the file. Raises `ValueError` with the last problem if no attempt gave one."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{instruction}\n\n{old}"},
    ]
    expected, problem = old, None
    for attempt in range(1, attempts + 1):
        answer = client.chat.completions.create(
            model=os.environ.get("MODEL") or client.models.list().data[0].id,
            messages=messages,
            temperature=0,
            prediction={"type": "content", "content": expected},
            extra_body=json.loads(os.environ.get("EXTRA_BODY", "{}")),
        )
        text = answer.choices[0].message.content or ""
        report(answer.usage, attempt)
        problem = problem_of(path, text, answer.choices[0].finish_reason)
        if problem is None:
            return text
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Mend this: {problem}"})
        expected = text  # the next answer resembles this one more than the old file
    raise ValueError(problem or "no attempt was made")


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a model to edit a file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("instruction")
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print the diff, change nothing")
    given = parser.parse_args()
    try:
        old = given.file.read_text(encoding="utf-8")
        client = OpenAI(
            base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
        )
        new = edit(client, given.file, old, given.instruction, given.attempts)
    except (OSError, ValueError, OpenAIError) as error:
        print(f"error: {given.file} is unchanged: {error}", file=sys.stderr)
        return 1
    lines = (text.splitlines(keepends=True) for text in (old, new))
    sys.stdout.writelines(difflib.unified_diff(*lines, str(given.file), str(given.file)))
    if not given.dry_run:
        given.file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
