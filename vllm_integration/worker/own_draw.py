"""Verification of sampled drafts by the request's own draw, on the V2 model runner.

vLLM's sampler draws a token by the Gumbel maximum, with noise that is a function of seed and position. Its
rejection sampler flips a coin for each draft instead, and draws again after a rejection. For drafts that no model
samples this module does neither:

    drawn = the token of each row of logits that the sampler draws in a step without drafts
    accepted = the drafts that equal `drawn`, up to the first that does not; the next of `drawn` follows them

Each token is a plain draw of the model, the same with any drafts. A draft d is accepted with probability p(d), as
by the coin; a text that was sampled with the same seed from a similar distribution is mostly drawn again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from ..seams.guard import Guard
from ..seams.install import Original, install, seam

#: `RequestState` of a model runner that verifies so → the guard of that.
_runners: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()


def verify_by_own_draw(vllm_config: Any, device: torch.device, req_states: Any) -> None:
    """Have the runner of these `req_states` verify so. Where a seam is missing, and for the methods of vLLM's that
    are not its standard one, its rejection sampler stays."""
    speculative, num_ranks = vllm_config.speculative_config, vllm_config.parallel_config.tensor_parallel_size
    if speculative.rejection_sample_method == "standard" and not install("draws"):
        guard = Guard("own draws", "verifies no drafts by the request's own draw", num_ranks=num_ranks)
        _runners[req_states] = guard
        row, K = torch.zeros(1, dtype=torch.int32, device=device), speculative.num_speculative_tokens
        guard.run(accept, row.long(), row, torch.cat([row, row + 1]), K)  # compiles the kernel


@seam("draws._verify")
def verify(
    original: Original,
    self: Any,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *args: Any,
) -> Any:
    """`RejectionSampler._verify`: the processed logits, the tokens of each request, how many of them count."""
    guard = _runners.get(self.sampler.req_states) if draft_logits is None else None
    given = logits, draft_sampled, pos, cu_num_logits, *args
    found = None if guard is None else guard.run(_verify, self, *given)
    return original(self, logits, draft_logits, *given[1:]) if found is None else found


# By name: a parameter that a later vLLM adds is a fault here, and the coin stays. By place it would be taken for
# the drafts.
def _verify(
    sampler: Any,
    logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    idx_mapping_np: Any,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    seq_lens_upper_bound_np: Any,
    verify_draft_sampled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn, processed = sampler.sampler.sample(
        logits,
        expanded_idx_mapping,
        idx_mapping,
        idx_mapping_np,
        pos,
        draft_sampled,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        return_logprobs=True,  # where these are of the processed logits, they are kept
    )
    return processed, *accept(drawn, verify_draft_sampled, cu_num_logits, sampler.num_speculative_steps)


def accept(
    drawn: torch.Tensor, drafts: torch.Tensor, cu_num_logits: torch.Tensor, num_draft_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of B requests, [B, K + 1] int64, and how many of them count, [B] int32, 1 to K + 1.

    ::

        rows = range(cu_num_logits[b], cu_num_logits[b + 1])        # at most K + 1
        count = 1 + the first i with drawn[rows[i]] != drafts[rows[i + 1]], or len(rows) - 1 without one
        tokens[b, :count] = drawn[rows[:count]]

    drawn: [R] int64, of each row of logits. drafts: [R] integers, the token that each row was fed: the draft after
    row r is that of row r + 1; -1 is no draft. cu_num_logits: [B + 1] int32.
    """
    num_reqs = len(cu_num_logits) - 1
    tokens = drawn.new_empty((num_reqs, num_draft_tokens + 1))
    count = torch.empty(num_reqs, dtype=torch.int32, device=drawn.device)
    block = triton.next_power_of_2(num_draft_tokens + 1)
    _accept_kernel[(num_reqs,)](
        tokens, tokens.stride(0), count, drawn, drafts, cu_num_logits, BLOCK_K=block, num_warps=1
    )
    return tokens, count


@triton.jit  # type: ignore[untyped-decorator]
def _accept_kernel(
    tokens_ptr: Any,  # [B, K + 1] int64
    stride_tokens_b: Any,
    count_ptr: Any,  # [B] int32
    drawn_ptr: Any,  # [R] int64
    drafts_ptr: Any,  # [R]
    cu_num_logits_ptr: Any,  # [B + 1] int32
    BLOCK_K: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + i_request).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + i_request + 1)
    o_token = tl.arange(0, BLOCK_K)
    m_token = start + o_token < end
    b_drawn = tl.load(drawn_ptr + start + o_token, mask=m_token, other=-1)
    b_draft = tl.load(drafts_ptr + start + 1 + o_token, mask=start + 1 + o_token < end, other=-1)
    # No draft comes after the last row, so that one differs there at the latest.
    first = tl.min(tl.where(m_token & (b_drawn != b_draft), o_token, BLOCK_K - 1), axis=0)
    tl.store(tokens_ptr + i_request * stride_tokens_b + o_token, b_drawn, mask=m_token)
    tl.store(count_ptr + i_request, first + 1)
