"""A service that merges an edit snippet into a file: `POST /apply`, with the original file as the prediction.

::

    python docs/examples/fast_apply.py
    curl localhost:9000/apply -H 'content-type: application/json' -d '{
      "original": "def a():\\n    return 1\\n\\ndef b():\\n    return 2\\n",
      "snippet": "# ... existing code ...\\ndef b():\\n    return 3\\n"}'

A model that plans an edit writes a short snippet with marks for what stays; a second, small model writes the
merged file. Nearly all of that file is the original, so it is the prediction. The environment names the server of
the merging model (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MODEL`); `EXTRA_BODY` is JSON that is added to each
request. Needs `pip install openai fastapi uvicorn`.
"""

from __future__ import annotations

import json
import os

from fastapi import FastAPI, HTTPException
from openai import APIStatusError, AsyncOpenAI, OpenAIError
from pydantic import BaseModel, Field

PROMPT = """\
Merge the snippet into the file. Where it says "existing code", keep the lines of the file. Answer with the file.

File:
{original}
Snippet:
{snippet}"""

app = FastAPI(title="fast apply")


class Edit(BaseModel):
    original: str = Field(max_length=400_000)
    snippet: str = Field(min_length=1, max_length=100_000)


class Merged(BaseModel):
    """The merged file, and how many tokens of the original were accepted as drafts, or rejected."""

    merged: str
    completion_tokens: int
    accepted_prediction_tokens: int | None
    rejected_prediction_tokens: int | None


@app.post("/apply")
async def apply(edit: Edit) -> Merged:
    client = AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    try:
        async with client:
            answer = await client.chat.completions.create(
                model=os.environ.get("MODEL") or (await client.models.list()).data[0].id,
                messages=[{"role": "user", "content": PROMPT.format(**edit.model_dump())}],
                temperature=0,
                prediction={"type": "content", "content": edit.original},
                extra_body=json.loads(os.environ.get("EXTRA_BODY", "{}")),
            )
    except APIStatusError as error:  # for example a file that is longer than the model's context
        raise HTTPException(502, f"the model's server refused the request: {error.message}") from None
    except OpenAIError as error:
        raise HTTPException(503, f"the model's server does not answer: {error}") from None
    choice, usage = answer.choices[0], answer.usage
    if choice.finish_reason != "stop" or choice.message.content is None or usage is None:
        raise HTTPException(502, f"the merged file is not complete (finish_reason: {choice.finish_reason})")
    details = usage.completion_tokens_details
    return Merged(
        merged=choice.message.content,
        completion_tokens=usage.completion_tokens,
        accepted_prediction_tokens=details and details.accepted_prediction_tokens,
        rejected_prediction_tokens=details and details.rejected_prediction_tokens,
    )


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, port=9000)
