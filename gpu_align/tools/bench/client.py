"""A client of an OpenAI-compatible server: streams with the time of every piece, and the counters of ``/metrics``.

It speaks HTTP through httpx. The official client parses each piece into objects, which at 128 streams takes
longer than a small model's step and would be measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families


class BenchError(Exception):
    """The run cannot begin or go on. The message is one line and names the value that is wrong.

    Attributes:
        log: the last lines of a server's log, "" where no server of ours died.
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        self.log = log
        super().__init__(" ".join(message.split()))


class WrongOptionError(BenchError):
    """An option is wrong, so that nothing was measured."""


class RequestRefusedError(BenchError):
    """The server answered with HTTP 400 or 422."""


CONNECT_TIMEOUT_S = 5.0
_SHORT_TIMEOUT = httpx.Timeout(15.0, connect=CONNECT_TIMEOUT_S)
#: How long `/metrics` may come after the last answer.
SETTLE_S = 3.0
#: How long other counters may still move once all output tokens are counted.
REST_S = 0.5
POLL_S = 0.05


@dataclass
class Answer:
    """One streamed answer."""

    text: str = ""  #: reasoning included
    output_tokens: int = 0  #: as the server counts them, without billed rejections
    #: seconds since the piece before, or since the request was sent, and tokens of each piece
    pieces: list[tuple[float, int]] = field(default_factory=list)
    accepted: int | None = None  #: prediction tokens as `usage` has them
    rejected: int | None = None
    id: str = ""  #: the server's name of the request
    token_ids: list[int] = field(default_factory=list)  #: where they were asked for
    prompt_token_ids: list[int] = field(default_factory=list)

    def token_gaps_s(self) -> list[float]:
        """The time before a piece, divided evenly among its tokens; none before the first."""
        gaps = [0.0] * (self.pieces[0][1] - 1)
        for seconds, tokens in self.pieces[1:]:
            gaps += [seconds / tokens] * tokens
        return gaps


#: Counters of `/metrics`, and what they are called here.
_COUNTERS = {
    "vllm:generation_tokens_total": "generated",
    "vllm:request_success_total": "requests",
    "vllm:spec_decode_num_drafts_total": "vllm_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "vllm_drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "vllm_accepted",
    "gpu_align_steps_total": "plugin_steps",
}


@dataclass(frozen=True)
class Counts:
    """Counters of one moment, or what they counted between two; summed over engines and API servers."""

    #: by the names of `_COUNTERS`; those that the server does not have are not there
    numbers: Counter[str] = field(default_factory=Counter)
    #: by (source, verdict): what the plugin verified; vLLM counts draft tokens beyond an answer's end, too
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)
    has_plugin: bool = False
    info: dict[str, str] = field(default_factory=dict)  #: labels of `gpu_align_info`

    @classmethod
    def read(cls, text: str) -> Counts | None:
        """The counters of a `/metrics` page; None where vLLM has not written it."""
        numbers: Counter[str] = Counter()
        drafts: Counter[tuple[str, str]] = Counter()
        has_plugin, info = False, {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    has_plugin |= sample.name.startswith("gpu_align_")
                    if name := _COUNTERS.get(sample.name):
                        numbers[name] += int(sample.value)
                    elif sample.name == "gpu_align_draft_tokens_total":
                        drafts[sample.labels["source"], sample.labels["verdict"]] += int(sample.value)
                    elif sample.name == "gpu_align_info":
                        info = dict(sample.labels)
        except (ValueError, KeyError, OverflowError):
            return None
        return cls(numbers, drafts, has_plugin, info) if "generated" in numbers else None

    def since(self, before: Counts) -> Counts:
        numbers, drafts = self.numbers.copy(), self.drafts.copy()
        numbers.subtract(before.numbers)
        drafts.subtract(before.drafts)
        return Counts(numbers, drafts, self.has_plugin)

    @property
    def generated(self) -> int:
        """Output tokens of all requests."""
        return self.numbers["generated"]

    @property
    def accepted(self) -> int:
        return self._verdict("accepted") if self.has_plugin else self.numbers["vllm_accepted"]

    @property
    def rejected(self) -> int:
        if self.has_plugin:
            return self._verdict("rejected")
        return self.numbers["vllm_drafted"] - self.numbers["vllm_accepted"]

    def steps(self, pieces: int = 0) -> int:
        """Forward passes that produced tokens, a pass counted once for each request in it.

        The plugin counts them for requests that get drafts; others get one token a step. With vLLM's own drafts
        this is the largest of three lower bounds, see README.md.
        """
        numbers = self.numbers
        if self.has_plugin or not numbers["vllm_drafts"]:
            return numbers["plugin_steps"] or self.generated
        return max(
            self.generated - numbers["vllm_accepted"], numbers["vllm_drafts"] + numbers["requests"], pieces
        )

    def by_source(self) -> dict[str, dict[str, int]]:
        """Of each source that had any."""
        sources = sorted({source for (source, _), n in self.drafts.items() if n})
        verdicts = ("accepted", "rejected")
        return {source: {v: self.drafts[source, v] for v in verdicts} for source in sources}

    def _verdict(self, verdict: str) -> int:
        return sum(n for (_, found), n in self.drafts.items() if found == verdict)


def proxy_for(url: str) -> str | None:
    """The proxy of the environment for a URL; None for a loopback address, and for what NO_PROXY names: hosts and
    domains, which may have a port, addresses, networks (``10.0.0.0/8``, ``fe80::/10``), ``*``."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    host, port, address = (parts.hostname or "").rstrip("."), str(parts.port or ""), None
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
    if not proxy or f".{host}".endswith(".localhost") or (address is not None and address.is_loopback):
        return None
    for entry in proxies.get("no", "").lower().split(","):
        named = entry.strip().rpartition("://")[2]
        with contextlib.suppress(ValueError):
            if address is not None and address in ipaddress.ip_network(named.strip("[]"), strict=False):
                return None
        domain = named.removesuffix(f":{port}").strip("[]").lstrip("*").lstrip(".")
        if named == "*" or (domain and f".{host}".endswith(f".{domain}")):
            return None
    return proxy if "://" in proxy else f"http://{proxy}"


def http_client(url: str, **more: Any) -> httpx.AsyncClient:
    """A client of the server of `url`, through the proxy that the environment names for it; BenchError where that
    or the certificates (``SSL_CERT_FILE``) cannot be used. httpx does not look itself: networks end it."""
    try:
        verify: Any = httpx.create_ssl_context() if url.startswith("https:") else False
        return httpx.AsyncClient(proxy=proxy_for(url), verify=verify, trust_env=False, **more)
    except (ValueError, OSError, ImportError, httpx.InvalidURL) as error:
        raise BenchError(f"{url}: no client with the environment's proxy: {error}") from error


class Client:
    """One server and one model on it. base_url: ends in ``/v1``. timeout_s: the longest wait for a piece of an
    answer. body: more fields of each request. fresh_prefix: a `cache_salt` for each, so that vLLM's prefix cache
    does not spare its prefill."""

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
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise BenchError("API key (--api-key or OPENAI_API_KEY): expected printable ASCII, found others")
        self._http = http_client(
            self.base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, pool=None),  # a busy server is slow to accept, too
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def choose_model(self, name: str | None) -> None:
        """Take the model of this name, or the only one; BenchError if it is missing, or no server answers."""
        url = f"{self.base_url}/models"
        async with self._asked("GET", url, timeout=_SHORT_TIMEOUT) as response:
            await response.aread()
        try:
            found = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{url}: expected a list of models, found {response.text[:80]!r}") from error
        known = ", ".join(found) or "no model"
        if name is None and len(found) != 1:
            raise WrongOptionError(f"--model: {self.base_url} serves {known}: name one")
        self.model = next(iter(found)) if name is None else name
        if self.model not in found:
            raise WrongOptionError(f"--model: {self.base_url} serves {known}, not {name!r}")
        chosen = found[self.model]
        self.root, self.vllm = str(chosen.get("root") or self.model), chosen.get("owned_by") == "vllm"

    async def root_text(self, path: str) -> str:
        """The answer of a path beside ``/v1``, such as ``/metrics``; "" without one."""
        try:
            response = await self._http.get(self.base_url.removesuffix("/v1") + path, timeout=_SHORT_TIMEOUT)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    async def counts(self) -> Counts | None:
        return Counts.read(await self.root_text("/metrics"))

    async def counted(self, before: Counts, tokens: int) -> Counts | None:
        """The counts since `before`, once all `tokens` output tokens are in them and nothing moves, at the latest
        after `SETTLE_S` seconds, or `REST_S` seconds after all tokens: other clients may keep a server busy."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        last: Counts | None = None
        while (now := await self.counts()) is not None:
            found = now.since(before)
            if found.generated >= tokens:
                if found == last:
                    return found
                deadline = min(deadline, loop.time() + REST_S)
            if loop.time() >= deadline:
                return found
            last = found
            await asyncio.sleep(POLL_S)
        return None

    async def stream(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        prediction: str | Mapping[str, Any] | None,
        more: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Send one greedy request, with these fields too, and read its answer; BenchError where it fails."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.vllm else {})
        salt = {"cache_salt": uuid.uuid4().hex} if self.vllm and self._fresh_prefix else {}
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0, **salt}
        body |= {"max_tokens": max_tokens, **self._more, "stream": True, "stream_options": options}
        body |= more or {}
        if prediction is not None:
            whole = isinstance(prediction, Mapping)
            body["prediction"] = prediction if whole else {"type": "content", "content": prediction}
        answer, counted, counts_by_piece = Answer(), 0, False
        last = time.perf_counter()
        async with self._asked("POST", f"{self.base_url}/chat/completions", json=body) as response:
            async for event in _events(response):
                now = time.perf_counter()
                if "error" in event:
                    raise BenchError(f"{self.base_url}: the stream broke off: {_message(event)}")
                choices, usage = event.get("choices") or [], event.get("usage") or {}
                tokens = usage.get("completion_tokens")
                counts_by_piece |= bool(choices) and tokens is not None
                if tokens is not None and (choices or not counts_by_piece):
                    answer.output_tokens = tokens
                text = _take(answer, event, choices, usage)
                new = answer.output_tokens - counted if counts_by_piece else int(bool(text))
                if new > 0 or text:
                    counted += max(new, 0)
                    answer.pieces.append((now - last, max(new, 1)))
                    last = now
        if not answer.pieces or not answer.output_tokens:
            found = f"found {len(answer.pieces)} pieces"
            raise BenchError(f"{self.base_url}: expected a stream with text and usage, {found}")
        later = len(answer.pieces) - 1
        if not counts_by_piece and later:
            # Usage came at the end only: the tokens, at least one each, are spread over the later pieces.
            total = max(answer.output_tokens - 1, later)
            ends = [i * total // later for i in range(later + 1)]
            for i in range(later):
                answer.pieces[i + 1] = (answer.pieces[i + 1][0], ends[i + 1] - ends[i])
        return answer

    @contextlib.asynccontextmanager
    async def _asked(self, method: str, url: str, **more: Any) -> AsyncIterator[httpx.Response]:
        """The answer to a request with HTTP 200, not yet read; all else is a BenchError."""
        try:
            async with self._http.stream(method, url, **more) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(response)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise BenchError(f"{self.base_url}: no answer: {str(error) or type(error).__name__}") from error

    def _refused(self, response: httpx.Response) -> BenchError:
        code, place = response.status_code, f"{self.base_url}: HTTP {response.status_code}"
        if code in (401, 403):
            return BenchError(f"{place}: the API key is refused (--api-key or OPENAI_API_KEY)")
        if code == 404:
            return BenchError(f"{response.url}: HTTP 404: no OpenAI-compatible server, or not this model")
        try:
            said = _message(response.json())
        except ValueError:
            said = response.text
        kind = RequestRefusedError if code in (400, 422) else BenchError
        return kind(f"{place}: {said[:300]}")


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


def _take(
    answer: Answer, event: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]
) -> str:
    """Add an event to the answer; its text."""
    answer.id = event.get("id") or answer.id
    answer.prompt_token_ids += event.get("prompt_token_ids") or []
    details = usage.get("completion_tokens_details") or {}
    if details.get("accepted_prediction_tokens") is not None:
        answer.accepted = int(details["accepted_prediction_tokens"])
        answer.rejected = int(details.get("rejected_prediction_tokens") or 0)
    if not choices:
        return ""
    answer.token_ids += choices[0].get("token_ids") or []
    delta = choices[0].get("delta") or {}
    text = "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))
    answer.text += text
    return text


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, Mapping) else body
    return str(error.get("message", error) if isinstance(error, Mapping) else error)
