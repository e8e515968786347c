"""instructor: a typed answer, with structured output on the server and the last answer as prediction."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    severity: Literal["low", "high"]
    component: Literal["parser", "server", "docs"]
    open: bool


server = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
client = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)
request = {
    "model": os.environ.get("MODEL", "tiny"),
    "messages": [{"role": "user", "content": "The server is down."}],
    "response_model": Ticket,
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}
ticket, raw = client.chat.completions.create_with_completion(**request)
prediction = {"type": "content", "content": raw.choices[0].message.content}
hinted, raw = client.chat.completions.create_with_completion(**request, prediction=prediction)
print("instructor", raw.id, hinted.model_dump() == ticket.model_dump())
