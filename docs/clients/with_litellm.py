"""LiteLLM, as a library: synchronous, streaming, asynchronous. `openai/` and `hosted_vllm/` send the field."""

import asyncio
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no request to GitHub at import

import litellm

SERVER = {
    "api_base": os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "none"),
}
MODEL = os.environ.get("MODEL", "tiny")
MESSAGES = [{"role": "user", "content": os.environ.get("QUESTION", "w5 w17 w201 w33 w8 w90")}]

for provider in ("openai", "hosted_vllm"):
    request = {
        **SERVER,
        "model": f"{provider}/{MODEL}",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 60,
    }
    answer = litellm.completion(**request).choices[0].message.content
    prediction = {"type": "content", "content": answer}
    hinted = litellm.completion(**request, prediction=prediction)
    print(provider, hinted.id, hinted.choices[0].message.content == answer)
    chunks = list(litellm.completion(**request, prediction=prediction, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    print(f"{provider}-stream", chunks[0].id, text == answer)
    hinted = asyncio.run(litellm.acompletion(**request, prediction=prediction))
    print(f"{provider}-async", hinted.id, hinted.choices[0].message.content == answer)
