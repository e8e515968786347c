"""openai-python: synchronous, asynchronous, streaming; chat, completions and responses."""

import asyncio
import os

from openai import AsyncOpenAI, OpenAI

SERVER = {
    "base_url": os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "none"),
}
MODEL = os.environ.get("MODEL", "tiny")
MESSAGES = [{"role": "user", "content": os.environ.get("QUESTION", "w5 w17 w201 w33 w8 w90")}]
REQUEST = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}

client = OpenAI(**SERVER)
answer = client.chat.completions.create(**REQUEST).choices[0].message.content
prediction = {"type": "content", "content": answer}  # in life: the file before the edit

hinted = client.chat.completions.create(**REQUEST, prediction=prediction)
print("chat", hinted.id, hinted.choices[0].message.content == answer)

parts = ""
for chunk in client.chat.completions.create(**REQUEST, prediction=prediction, stream=True):
    parts += (chunk.choices[0].delta.content or "") if chunk.choices else ""
print("chat-stream", chunk.id, parts == answer)


async def asynchronously() -> None:
    async with AsyncOpenAI(**SERVER) as client:
        hinted = await client.chat.completions.create(**REQUEST, prediction=prediction)
        print("chat-async", hinted.id, hinted.choices[0].message.content == answer)
        parts = ""
        async for chunk in await client.chat.completions.create(
            **REQUEST, prediction=prediction, stream=True
        ):
            parts += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        print("chat-async-stream", chunk.id, parts == answer)


asyncio.run(asynchronously())

# The client does not know the field on these two; `extra_body` sends it as it is.
request = {"model": MODEL, "prompt": MESSAGES[0]["content"], "temperature": 0, "max_tokens": 60}
text = client.completions.create(**request).choices[0].text
hinted = client.completions.create(**request, extra_body={"prediction": text})
print("completions", hinted.id, hinted.choices[0].text == text)

request = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 60}
hinted = client.responses.create(**request, extra_body={"prediction": prediction})
print("responses", hinted.id, hinted.output_text == answer)
*_, last = client.responses.create(**request, extra_body={"prediction": prediction}, stream=True)
print("responses-stream", last.response.id, last.response.output_text == answer)
