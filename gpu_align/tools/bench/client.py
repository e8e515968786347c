"""A streaming client of an OpenAI-compatible server that keeps the time of every piece.

It speaks HTTP through httpx. The official client parses each piece into objects, which at 128 streams takes
longer than a small model's step and would be measured too.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx


class BenchError(Exception):
    """The run cannot begin or go on. The message is one line and names the value that is wrong.

    Attributes:
        log: the last lines of a server's log, "" where no server of ours died.
        usage: whether an option is wrong, so that nothing was measured.
    """

    def __init__(self, message: str, *, log: str = "", usage: bool = False) -> None:
        self.log = log
        self.usage = usage
        super().__init__(" ".join(message.split()))


CONNECT_TIMEOUT_S = 5.0
_TOP_LOGPROBS = 5


class RequestRefusedError(BenchError):
    """The server answered with HTTP 400 or 422: this request is not possible."""


@dataclass
class Answer:
    """One streamed answer.

    Attributes:
        text: the whole text, reasoning included.
        output_tokens: as the server counts them, without billed rejections.
        ttft_s: seconds from sending the request to the first piece.
        first_tokens: tokens of the first piece.
        gaps: seconds since the piece before, and tokens, of each piece after the first.
        accepted, rejected: prediction tokens as `usage` has them, None where it does not.
        id: the server's name of the request.
        token_ids, prompt_token_ids: where they were asked for.
    """

    text: str = ""
    output_tokens: int = 0
    ttft_s: float = 0.0
    first_tokens: int = 1
    gaps: list[tuple[float, int]] = field(default_factory=list)
    accepted: int | None = None
    rejected: int | None = None
    id: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)

    def token_gaps_s(self) -> list[float]:
        """Inter-token latencies: the time before a piece, divided evenly among its tokens."""
        gaps = [0.0] * max(0, self.first_tokens - 1)
        for seconds, tokens in self.gaps:
            gaps += [seconds / tokens] * tokens
        return gaps


@dataclass(frozen=True)
class Alternatives:
    """One token of a text: where it begins, and the likeliest tokens there with their log probabilities."""

    start: int
    text: str
    logprobs: list[tuple[str, float]]


class Client:
    """One server and one model on it.

    Args:
        base_url: ends in ``/v1``.
        api_key: sent as a bearer token; None: no header.
        timeout_s: the longest wait for a piece of an answer.
        fresh_prefix: whether each request gets a `cache_salt` of its own, so that vLLM's prefix cache does not
            spare its prefill.
        body: further fields of each request.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        timeout_s: float,
        *,
        fresh_prefix: bool = True,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        #: set by `choose_model`: what to ask for, the name or folder it was loaded from, and whether this is vLLM
        self.model = self.root = ""
        self.vllm = False
        self._fresh_prefix = fresh_prefix
        self._more = dict(body or {})
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def choose_model(self, name: str | None) -> None:
        """Take the model of this name, or the only one.

        Raises:
            BenchError: nobody answers, the key is refused, or this is no OpenAI server; the model is not served,
                or several are and none is named.
        """
        url, timeout = f"{self.base_url}/models", httpx.Timeout(15.0, connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._http.get(url, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(response)
        try:
            found = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{url}: expected a list of models, found {response.text[:80]!r}") from error
        known = ", ".join(found) or "no model"
        if name is None and len(found) != 1:
            raise BenchError(f"--model: {self.base_url} serves {known}: name one", usage=True)
        self.model = next(iter(found)) if name is None else name
        if self.model not in found:
            raise BenchError(f"--model: {self.base_url} serves {known}, not {name!r}", usage=True)
        chosen = found[self.model]
        self.root, self.vllm = str(chosen.get("root") or self.model), chosen.get("owned_by") == "vllm"

    async def metrics(self) -> str | None:
        """Return the page at ``/metrics``; None where there is none."""
        return await self.root_text("/metrics")

    async def root_text(self, path: str) -> str | None:
        """Return what a path beside ``/v1`` answers, such as ``/metrics``; None where there is none."""
        try:
            response = await self._http.get(self.base_url.removesuffix("/v1") + path, timeout=15.0)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def stream(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, prediction: str | None
    ) -> Answer:
        """Send one greedy request and read its answer as it comes.

        Raises:
            RequestRefusedError: the server refuses this request.
            BenchError: the server cannot be reached, fails, or sends no stream.
        """
        body = self._body(messages, max_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.vllm:
            body["stream_options"]["continuous_usage_stats"] = True
        if prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        started = last = time.perf_counter()
        answer = Answer()
        counted = 0
        texts: list[str] = []
        counts_by_piece = False
        try:
            async with self._http.stream("POST", f"{self.base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(response)
                async for event in _events(response):
                    now = time.perf_counter()
                    if "error" in event:
                        raise BenchError(f"{self.base_url}: the stream broke off: {_message(event)}")
                    choices, usage = event.get("choices") or [], event.get("usage") or {}
                    tokens = usage.get("completion_tokens")
                    counts_by_piece |= bool(choices) and tokens is not None
                    if tokens is not None and (choices or not counts_by_piece):
                        answer.output_tokens = tokens
                    _take(answer, event, choices, usage)
                    text = _text(choices)
                    new = answer.output_tokens - counted if counts_by_piece else int(bool(text))
                    if new <= 0 and not text:
                        continue
                    counted += max(new, 0)
                    if texts:
                        answer.gaps.append((now - last, max(new, 1)))
                    else:
                        answer.ttft_s, answer.first_tokens = now - started, max(new, 1)
                    texts.append(text)
                    last = now
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        answer.text = "".join(texts)
        if not texts or not answer.output_tokens:
            raise BenchError(
                f"{self.base_url}: expected a stream with text and usage, found {len(texts)} pieces"
            )
        if not counts_by_piece and answer.gaps:
            # Usage came at the end only: the tokens, at least one each, are spread over the pieces.
            pieces = len(answer.gaps)
            total = max(answer.output_tokens - answer.first_tokens, pieces)
            ends = [i * total // pieces for i in range(pieces + 1)]
            answer.gaps = [(seconds, ends[i + 1] - ends[i]) for i, (seconds, _) in enumerate(answer.gaps)]
        return answer

    async def alternatives(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int
    ) -> list[Alternatives]:
        """Answer once more, without a prediction, with the likeliest tokens at each place.

        Raises:
            BenchError: as for `stream`.
        """
        body = self._body(messages, max_tokens) | {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        try:
            response = await self._http.post(f"{self.base_url}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(response)
        found, start = [], 0
        for entry in (response.json()["choices"][0].get("logprobs") or {}).get("content") or []:
            tops = [(top["token"], float(top["logprob"])) for top in entry.get("top_logprobs") or []]
            found.append(Alternatives(start, entry["token"], tops))
            start += len(entry["token"])
        return found

    def _body(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        if self.vllm and self._fresh_prefix:
            body["cache_salt"] = uuid.uuid4().hex
        return body | self._more

    def _unreachable(self, error: Exception) -> BenchError:
        return BenchError(f"{self.base_url}: no answer: {str(error) or type(error).__name__}")

    def _refused(self, response: httpx.Response) -> BenchError:
        code = response.status_code
        if code in (401, 403):
            return BenchError(
                f"{self.base_url}: HTTP {code}: the API key is refused (--api-key or OPENAI_API_KEY)"
            )
        if code == 404:
            return BenchError(f"{response.url}: HTTP 404: no OpenAI-compatible server, or not this model")
        try:
            said = _message(response.json())
        except ValueError:
            said = response.text
        kind = RequestRefusedError if code in (400, 422) else BenchError
        return kind(f"{self.base_url}: HTTP {code}: {said[:300]}")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, each on one ``data:`` line, as OpenAI's API has it."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise BenchError(f"{response.url}: expected JSON in the stream, found {data[:80]!r}") from error
        if isinstance(event, dict):
            yield event


def _text(choices: Sequence[Mapping[str, Any]]) -> str:
    if not choices:
        return ""
    delta = choices[0].get("delta") or {}
    return "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))


def _take(
    answer: Answer, event: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]
) -> None:
    """What an event says besides its text."""
    answer.id = event.get("id") or answer.id
    answer.prompt_token_ids += event.get("prompt_token_ids") or []
    if choices:
        answer.token_ids += choices[0].get("token_ids") or []
    details = usage.get("completion_tokens_details") or {}
    if details.get("accepted_prediction_tokens") is not None:
        answer.accepted = int(details["accepted_prediction_tokens"])
        answer.rejected = int(details.get("rejected_prediction_tokens") or 0)


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, Mapping) else body
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


Verdict = Literal["yes", "near-tie", "no"]
#: A difference may begin a few tokens before its first character: "ab" + "c" and "a" + "bd".
_TOKENS_BACK = 3


def first_difference(a: str, b: str) -> int:
    """Return the index of the first character in which two different texts differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_near_tie(a: str, b: str, places: Sequence[Alternatives], margin: float) -> bool:
    """Whether, where `a` and `b` part, a token of each was about equally likely.

    Args:
        a, b: two different answers to one request.
        places: the tokens of a third answer to it, with the likeliest alternatives.
        margin: the largest difference of two log probabilities that counts as a tie.

    Returns:
        False also where it cannot be told, because the third answer leaves both before they part.
    """
    at = first_difference(a, b)
    written = "".join(place.text for place in places)
    before = [place for place in places if place.start <= at and written[: place.start] == a[: place.start]]
    return any(_tie_at(a, b, at, place, margin) for place in before[-_TOKENS_BACK:])


def _tie_at(a: str, b: str, at: int, place: Alternatives, margin: float) -> bool:
    rest_a, rest_b = a[place.start :], b[place.start :]
    fitting = {
        token: logprob
        for token, logprob in place.logprobs
        if token and (rest_a.startswith(token) or rest_b.startswith(token))
    }
    if place.start == at and not (
        rest_a and rest_b
    ):  # one answer ends here: any other token stands for its end
        ending = [logprob for token, logprob in place.logprobs if token not in fitting]
        return any(abs(x - y) <= margin for x in fitting.values() for y in ending)
    if place.start == at:  # the tokens must be of different answers
        of_a = [logprob for token, logprob in fitting.items() if rest_a.startswith(token)]
        of_b = [logprob for token, logprob in fitting.items() if rest_b.startswith(token)]
        return any(abs(x - y) <= margin for x in of_a for y in of_b)
    values = sorted(fitting.values(), reverse=True)
    return len(values) > 1 and values[0] - values[1] <= margin
