"""A step on paper: how long it takes on a GPU, by its tokens. README.md has the assumptions.

Units: bytes a second, operations a second (dense, no sparsity), bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


class Gpu(NamedTuple):
    """One GPU of a data sheet. link: NVLink, one direction."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float
    memory: float
    link: float


class Model(NamedTuple):
    """A decoder with grouped-query attention. embedding: of its parameters; looked up, not multiplied. Of a
    mixture of experts, `top` of `experts` for each token: always, the parameters that all tokens use."""

    name: str
    params: float
    embedding: float
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    experts: int = 1
    top: int = 1
    always: float = 0.0


# NVIDIA's data sheets, SXM, without sparsity (B200: of a DGX, an eighth), and the config.json of Llama 3.1.
H100 = Gpu("H100", 3.35e12, 989e12, 1979e12, 80e9, 450e9)
H200 = Gpu("H200", 4.8e12, 989e12, 1979e12, 141e9, 450e9)
B200 = Gpu("B200", 8.0e12, 2250e12, 4500e12, 180e9, 900e9)
SMALL = Model("8B", 8.03e9, 0.53e9, 32, 4096, 32)
LARGE = Model("70B", 70.6e9, 1.05e9, 80, 8192, 64)
# Their config.json: a token uses 3.0, 5.1 and 37 of 10⁹ parameters. DeepSeek's latent cache is as large as one
# head of 288.
QWEN = Model("Qwen3-30B-A3B", 30.5e9, 0.31e9, 48, 2048, 32, 4, 128, 151_936, 128, 8, 1.2e9)
GPT_OSS = Model("gpt-oss-120b", 117e9, 0.58e9, 36, 2880, 64, 8, 64, 201_088, 128, 4, 1.5e9)
DEEPSEEK = Model("DeepSeek-V3", 671e9, 0.93e9, 61, 7168, 128, 1, 288, 129_280, 256, 8, 16.2e9)
BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Roofline:
    """A step's time; `ms` has the formula. Shares, softness and overhead fit an H200 (`checked`).

    With several GPUs each holds its share of weights, KV cache, heads and vocabulary.
    """

    gpu: Gpu
    model: Model
    dtype: str
    #: Tokens of KV cache that each request reads, on average.
    context: int
    gpus: int = 1
    #: What good kernels reach of a data sheet's bandwidth and operations.
    bandwidth_share: float = 0.7
    compute_share: float = 0.6
    #: Memory and arithmetic overlap well, not perfectly. Where both sides of a soft maximum are equal the time is
    #: 2**(1/4) = 1.19 times either; a hard maximum would make drafts up to there free.
    softness: float = 2.0
    #: What a step costs whatever is in it; scheduling that is not hidden, launches, sampling.
    overhead_ms: float = 0.5
    #: Bytes a vocabulary entry and token: logits written and read in bf16, converted to float32, read twice
    #: (softmax or argmax, comparison with the draft).
    logits_bytes: float = 16.0
    #: Latency of one exchange between GPUs, twice a layer.
    exchange_us: float = 8.0
    #: Share of the memory that weights and KV cache may fill (vLLM's default).
    memory_share: float = 0.92
    #: Grouped products of experts reach this share of the dense ones.
    grouped_share: float = 0.7
    #: Share of a draft's experts that are its neighbour's beyond chance: 0.18 gives Mixtral's 62 % of tokens that
    #: have an expert in common with the one before, in place of 46 % (arXiv 2401.04088, table 5).
    repeats: float = 0.0
    #: Tokens of the largest CUDA graph, 0: of any size. Beyond it the host launches for so long meanwhile.
    captured: int = 0
    launch_ms_a_layer: float = 0.2

    @property
    def name(self) -> str:
        many = f"{self.gpus} × " if self.gpus > 1 else ""
        more = ", repeats" * (self.repeats > 0) + f", graphs to {self.captured}" * (self.captured > 0)
        return f"{many}{self.gpu.name}, {self.model.name} {self.dtype}, context {self.context:,}{more}"

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache a token on one GPU; in fp8 the cache is fp8, too."""
        m = self.model
        return 2 * m.layers * m.kv_heads * m.head_dim * BYTES[self.dtype] / self.gpus

    def fits(self, batch: int) -> bool:
        """Whether so many requests fit in memory."""
        held = self.model.params * BYTES[self.dtype] / self.gpus + batch * self.context * self.kv_bytes
        return held <= self.gpu.memory * self.memory_share

    def ms(self, batch: int, tokens: npt.ArrayLike) -> Times:
        """Milliseconds of a step over `batch` requests that verifies `tokens` tokens in all."""
        t = np.asarray(tokens, dtype=np.float64)
        m, bandwidth = self.model, self.gpu.bandwidth * self.bandwidth_share
        bf16 = self.gpu.bf16 * self.compute_share
        operations = getattr(self.gpu, self.dtype) * self.compute_share
        read = used = (m.params - m.embedding) / self.gpus
        if m.experts > 1:
            alone, share = batch + (t - batch) * (1 - self.repeats), m.top / m.experts
            routed = m.params - m.embedding - m.always
            read = (m.always + routed * (1 - (1 - share) ** alone)) / self.gpus
            used = (m.always + routed * share) / self.gpus
            operations *= self.grouped_share
        linear = self._soft_max(read * BYTES[self.dtype] / bandwidth, 2 * used * t / operations)
        attention = self._soft_max(
            batch * self.context * self.kv_bytes / bandwidth,
            4 * m.layers * m.q_heads * m.head_dim * self.context / self.gpus * t / bf16,
        )
        logits = t * m.vocab * self.logits_bytes / self.gpus / bandwidth
        exchange: Times | float = 0.0
        if self.gpus > 1:
            exchange = 2 * m.layers * (self.exchange_us * 1e-6 + t * m.hidden * 2 / self.gpu.link)
        ms = self.overhead_ms + 1e3 * (linear + attention + logits + exchange)
        launches = self._soft_max(m.layers * self.launch_ms_a_layer, ms)
        return np.asarray(np.where((t > self.captured) & (self.captured > 0), launches, ms))

    def _soft_max(self, a: Times | float, b: Times) -> Times:
        high = np.maximum(a, b)
        power = (a / high) ** self.softness + (b / high) ** self.softness
        return np.asarray(high * power ** (1 / self.softness))


DENSE = Roofline(H200, SMALL, "bf16", 500)
SETUPS = [
    DENSE,
    replace(DENSE, captured=512),
    Roofline(B200, SMALL, "fp8", 8_000),
    Roofline(H100, LARGE, "bf16", 2_000, 4),
    Roofline(H200, QWEN, "bf16", 500),
    Roofline(H200, QWEN, "bf16", 500, repeats=0.18, captured=512),
    Roofline(H200, GPT_OSS, "fp8", 2_000),
    Roofline(H200, DEEPSEEK, "fp8", 2_000, 8),
]
#: The setups whose numbers are shown; the first is the measured one. The worst case is over all of them.
SHOWN = tuple(SETUPS[i].name for i in (0, 4, 6, 7))
