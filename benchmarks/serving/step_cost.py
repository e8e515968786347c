"""How long a decode step takes: from a measured table, or from the data sheets of a GPU and a model.

Every number of the paper model is a field here with its source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


class StepCost(Protocol):
    """A step-time curve."""

    @property
    def name(self) -> str: ...

    def ms(self, batch: int, tokens: npt.ArrayLike) -> Times:
        """Milliseconds of a step over `batch` requests that verifies `tokens` tokens in all."""

    def fits(self, batch: int) -> bool:
        """Whether so many requests fit in memory."""


class Gpu(NamedTuple):
    """One GPU of a data sheet. Units: bytes a second, operations a second (dense, no sparsity), bytes."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float
    memory: float
    #: NVLink, one direction.
    link: float
    source: str


class Model(NamedTuple):
    """A dense decoder with grouped-query attention."""

    name: str
    params: float
    #: of these, the input embedding: looked up, neither read in full nor multiplied
    embedding: float
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3.35e12, 989e12, 1979e12, 80e9, 450e9, "NVIDIA H100 data sheet, SXM, without sparsity"),
        Gpu("H200", 4.8e12, 989e12, 1979e12, 141e9, 450e9, "NVIDIA H200 data sheet, SXM, without sparsity"),
        Gpu("B200", 8.0e12, 2250e12, 4500e12, 180e9, 900e9, "NVIDIA DGX B200 data sheet / 8, dense"),
    )
}  # fmt: skip
MODELS = {
    model.name: model
    for model in (
        Model("8B", 8.03e9, 0.53e9, 32, 4096, 32, 8, 128, 128_256, "Llama 3.1 8B, its config.json"),
        Model("70B", 70.6e9, 1.05e9, 80, 8192, 64, 8, 128, 128_256, "Llama 3.1 70B, its config.json"),
    )
}
BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Roofline:
    """A step on paper.

    ::

        linear    = soft_max(weight bytes / bandwidth, 2 * params * tokens / operations)
        attention = soft_max(batch * context * KV bytes a token / bandwidth,
                             4 * layers * q_heads * head_dim * context * tokens / bf16 operations)
        logits    = tokens * vocab * logits_bytes / bandwidth
        exchange  = 0 on one GPU, else 2 * layers * (exchange_us + tokens * hidden * 2 bytes / link)
        step      = overhead + linear + attention + logits + exchange
        soft_max(a, b) = (a**p + b**p) ** (1 / p),  p = softness

    Bandwidth and operations are the data sheet's times `bandwidth_share` and `compute_share`. With several
    GPUs each holds its share of weights, KV cache, heads and vocabulary.
    """

    gpu: Gpu
    model: Model
    dtype: str
    #: Tokens of KV cache that each request reads, on average.
    context: int
    gpus: int = 1
    #: Our assumption: what good kernels reach of a data sheet's bandwidth and operations.
    bandwidth_share: float = 0.8
    compute_share: float = 0.6
    #: Our assumption: memory and arithmetic overlap well, not perfectly. Where both sides of a soft maximum are
    #: equal the time is 2**(1/4) = 1.19 times either; a hard maximum would make drafts up to there free.
    softness: float = 4.0
    #: Our assumption: what a step costs whatever is in it; scheduling that is not hidden, launches, sampling.
    overhead_ms: float = 0.5
    #: Our assumption, in bytes a vocabulary entry and token: logits written and read in bf16, converted to
    #: float32, read twice (softmax or argmax, comparison with the draft).
    logits_bytes: float = 16.0
    #: Our assumption: latency of one exchange between GPUs, twice a layer.
    exchange_us: float = 8.0
    #: Our assumption: share of the memory that weights and KV cache may fill (vLLM's default).
    memory_share: float = 0.92

    @property
    def name(self) -> str:
        many = f"{self.gpus} × " if self.gpus > 1 else ""
        return f"{many}{self.gpu.name}, {self.model.name} {self.dtype}, context {self.context:,}"

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache a token on one GPU; in fp8 the cache is fp8, too."""
        m = self.model
        return 2 * m.layers * m.kv_heads * m.head_dim * BYTES[self.dtype] / self.gpus

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights read a step on one GPU."""
        return (self.model.params - self.model.embedding) * BYTES[self.dtype] / self.gpus

    def fits(self, batch: int) -> bool:
        held = self.model.params * BYTES[self.dtype] / self.gpus + batch * self.context * self.kv_bytes
        return held <= self.gpu.memory * self.memory_share

    def ms(self, batch: int, tokens: npt.ArrayLike) -> Times:
        t = np.asarray(tokens, dtype=np.float64)
        m, bandwidth = self.model, self.gpu.bandwidth * self.bandwidth_share
        bf16 = self.gpu.bf16 * self.compute_share
        operations = getattr(self.gpu, self.dtype) * self.compute_share
        linear = self._soft_max(
            self.weight_bytes / bandwidth, 2 * (m.params - m.embedding) / self.gpus * t / operations
        )
        attention = self._soft_max(
            batch * self.context * self.kv_bytes / bandwidth,
            4 * m.layers * m.q_heads * m.head_dim * self.context / self.gpus * t / bf16,
        )
        logits = t * m.vocab * self.logits_bytes / self.gpus / bandwidth
        exchange: Times | float = 0.0
        if self.gpus > 1:
            exchange = 2 * m.layers * (self.exchange_us * 1e-6 + t * m.hidden * 2 / self.gpu.link)
        return np.asarray(self.overhead_ms + 1e3 * (linear + attention + logits + exchange))

    def _soft_max(self, a: float, b: Times) -> Times:
        high = np.maximum(a, b)
        power = (a / high) ** self.softness + (b / high) ** self.softness
        return np.asarray(high * power ** (1 / self.softness))


@dataclass(frozen=True)
class Measured:
    """A measured curve: straight lines between its points, the last one carried on; the first is the least."""

    name: str
    tokens: tuple[float, ...]
    times_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise ValueError(f"points: expected 2 or more, found {len(self.tokens)}")
        if min(np.diff(self.tokens)) <= 0 or min(self.times_ms) <= 0:
            raise ValueError("tokens, ms: expected tokens that rise and times above 0")

    def fits(self, batch: int) -> bool:
        return batch <= self.tokens[-1]

    def ms(self, batch: int, tokens: npt.ArrayLike) -> Times:
        t = np.asarray(tokens, dtype=np.float64)
        x, y = np.array(self.tokens), np.array(self.times_ms)
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        beyond = np.maximum(0.0, t - x[-1]) * slope
        return np.asarray(np.interp(t, x, y) + beyond)


def read_measured(path: Path) -> Measured:
    """Read ``{"name": str, "points": [{"tokens": int, "ms": float}, ...]}``."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        points = sorted((float(p["tokens"]), float(p["ms"])) for p in fields["points"])
        columns = [*zip(*points, strict=True)] or [(), ()]
        return Measured(str(fields["name"]), *columns)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f'{path}: expected {{"name", "points": [{{"tokens", "ms"}}, …]}}, '
            f"found {type(error).__name__}: {error}"
        ) from error


#: (GPU, model, dtype, GPUs): one GPU where the weights fit with room for a cache, else the fewest of them.
SETUPS = (
    ("H100", "8B", "bf16", 1), ("H100", "8B", "fp8", 1), ("H100", "70B", "bf16", 4), ("H100", "70B", "fp8", 2),
    ("H200", "8B", "bf16", 1), ("H200", "8B", "fp8", 1), ("H200", "70B", "bf16", 2), ("H200", "70B", "fp8", 1),
    ("B200", "8B", "bf16", 1), ("B200", "8B", "fp8", 1), ("B200", "70B", "bf16", 2), ("B200", "70B", "fp8", 1),
)  # fmt: skip


def paper_costs(context: int) -> list[StepCost]:
    """`SETUPS` at one context length."""
    return [Roofline(GPUS[g], MODELS[m], d, context, n) for g, m, d, n in SETUPS]
