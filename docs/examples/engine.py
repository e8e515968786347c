"""A small engine: continuous batching over a transformers model, with drafts from `gpu_align.Drafter`.

    engine = Engine(model, max_slots=8)
    engine.add(Request(prompt_ids, max_new_tokens=200, prediction=prediction_ids))
    while engine.step(): ...

Requests come and go between steps. A step is one forward pass: it feeds every request the tokens that its KV
cache lacks (a new one its prompt) and the draft after them, verifies the drafts, and appends what was accepted
and one token more. Copy what you need. A production engine replaces the padded batch by a kernel for ragged
ones.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache

from gpu_align import Drafter, RecipePack, Recipes
from gpu_align.predictors import DraftModelTokenPredictor, PredictorLoop, TokenPredictor


@dataclass
class Request:
    """A caller's request, and its output so far."""

    prompt: Sequence[int]
    max_new_tokens: int = 64
    prediction: Sequence[int] = ()
    temperature: float = 0.0  # 0 is greedy
    max_draft_len: int = 64  # longest draft of this request; 0: no drafts
    predictor: TokenPredictor | None = None  # drafts instead of the drafter
    output: list[int] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0


class SlotCache(Cache):
    """Keys and values of all slots. A layer's rows are written and read where the engine says.

    There is nothing to do to go back: tokens behind a request's length are masked, and overwritten later.
    """

    def __init__(self, model: Any, max_slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # One position more than a slot holds takes what pads the batch.
        shape = (2, config.num_hidden_layers, max_slots, max_len + 1, heads, head_dim)
        self.stored = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.slots = self.positions = torch.empty(0)

    def point_at(self, slots: torch.Tensor, positions: torch.Tensor, longest: int) -> None:
        """The next pass is of these slots [B], its tokens stand at these positions [B, Q]."""
        self.slots, self.positions, self.longest = slots, positions, longest

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, heads, Q, head_dim]; return all that the slots hold, [B, heads, longest, head_dim]."""
        found = []
        for stored, new in zip(self.stored[:, layer_idx], (keys, values), strict=True):
            stored[self.slots[:, None], self.positions] = new.transpose(1, 2)
            found.append(stored[self.slots, : self.longest].transpose(1, 2))
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # the engine gives positions and masks itself


class Engine:
    """Serves requests in `max_slots` slots on the model's device."""

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 8,
        max_len: int = 2048,
        num_draft_tokens: int = 16,
        recipes: Recipes | None = None,
        end_tokens: Sequence[int] = (),
        drafts: bool = True,
        draft_model: Any = None,  # of the same tokens; drafts for requests that bring nothing
    ) -> None:
        self.model, self.device = model.eval(), model.device
        self.max_len, self.end_tokens, self.drafts = max_len, frozenset(end_tokens), drafts
        self.vocab_size, self.draft_model = model.config.vocab_size, draft_model
        self.drafter = Drafter(
            max_slots=max_slots,
            max_context_len=max_len,
            max_prediction_len=max_len,
            num_draft_tokens=num_draft_tokens,
            vocab_size=self.vocab_size,
            device=self.device,
            recipes=recipes,
        )
        # What the drafter reads.
        self.token_ids, self.total_len = self.drafter.token_ids, self.drafter.total_len
        self.cache = SlotCache(model, max_slots, max_len)
        self.lengths, self.computed, self.sampled = [0] * max_slots, [0] * max_slots, [0] * max_slots
        self.free = list(range(max_slots))
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.loops: dict[int, PredictorLoop] = {}
        self.steps = self.generated = 0

    def add(self, request: Request) -> None:
        """Queue a request; `step` admits it when there is a slot."""
        if not 0 < len(request.prompt) <= self.max_len - request.max_new_tokens:
            raise ValueError(f"request: expected 1 to {self.max_len} tokens in all")
        self.waiting.append(request)

    def _admit(self) -> None:
        while self.waiting and self.free:
            slot, request = self.free.pop(), self.waiting.popleft()
            self.running[slot] = request
            self.lengths[slot] = self.computed[slot] = self.sampled[slot] = 0
            self._append(slot, list(request.prompt))
            self.drafter.add(slot, list(request.prediction), len(request.prompt))
            predictor = request.predictor
            if predictor is None and self.draft_model is not None and not request.prediction:
                predictor = DraftModelTokenPredictor(self.draft_model)  # with a KV cache of its own
            if predictor is not None:
                loop = PredictorLoop(
                    predictor,
                    num_draft_tokens=self.drafter.num_draft_tokens,
                    vocab_size=self.vocab_size,
                )
                loop.start(request.prompt, request.prediction)
                self.loops[slot] = loop

    def _append(self, slot: int, tokens: list[int]) -> None:
        start, end = self.lengths[slot], self.lengths[slot] + len(tokens)
        self.token_ids[slot, start:end] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self.lengths[slot] = end
        self.total_len[slot] = end

    def _draft(self, slots: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Draft for every request: [B, K] token ids, and how many of each row are meant."""
        on_device = torch.tensor(slots, device=self.device)
        # No token was sampled before the prefill is done: the draft is empty then.
        sampled = torch.tensor([self.sampled[s] for s in slots], dtype=torch.int32, device=self.device)
        draft = self.drafter.propose(on_device, sampled)
        lengths = draft.length.tolist() if self.drafts else [0] * len(slots)
        for row, slot in enumerate(slots):
            request = self.running[slot]
            # The step adds a token of the model after the draft.
            room = min(request.max_draft_len, request.max_new_tokens - len(request.output) - 1)
            if slot in self.loops and self.drafts and self.sampled[slot]:
                own = self.loops[slot].draft(room)
                draft.token_ids[row, : len(own)] = torch.tensor(own, dtype=torch.int64, device=self.device)
                lengths[row] = len(own)
            lengths[row] = min(lengths[row], room)
        return draft.token_ids, lengths

    def _forward(self, slots: list[int], draft_ids: torch.Tensor, draft_len: list[int]) -> torch.Tensor:
        """One pass: logits after each request's last token and each of its drafts, [B, 1 + most, vocab]."""
        rows = []
        for row, slot in enumerate(slots):
            pending = self.token_ids[slot, self.computed[slot] : self.lengths[slot]].long()
            rows.append(torch.cat([pending, draft_ids[row, : draft_len[row]]]))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, Q]
        fed = torch.tensor([len(row) for row in rows], device=self.device)
        start = torch.tensor([self.computed[slot] for slot in slots], device=self.device)
        offsets = torch.arange(ids.shape[1], device=self.device)
        is_padding = offsets >= fed[:, None]
        positions = (start[:, None] + offsets).masked_fill(is_padding, self.max_len)
        longest = int((start + fed).max())
        is_hidden = torch.arange(longest, device=self.device) > positions[:, None, :, None]
        mask = torch.zeros(is_hidden.shape, dtype=self.model.dtype, device=self.device)  # [B, 1, Q, longest]
        mask.masked_fill_(is_hidden, torch.finfo(self.model.dtype).min)
        self.cache.point_at(torch.tensor(slots, device=self.device), positions, longest)
        outputs = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions.masked_fill(is_padding, 0),
            past_key_values=self.cache,
            use_cache=True,
        )
        # Requests have prompts and drafts of many lengths: line up what is wanted of each.
        wanted = fed - 1 - torch.tensor(draft_len, device=self.device)
        at = (wanted[:, None] + torch.arange(1 + max(draft_len), device=self.device)).clamp(
            max=ids.shape[1] - 1
        )
        return outputs.logits.gather(1, at[..., None].expand(-1, -1, outputs.logits.shape[-1])).float()

    @torch.no_grad()
    def step(self) -> bool:
        """Run one step; False when nothing is left to do."""
        self._admit()
        if not self.running:
            return False
        slots = sorted(self.running)
        draft_ids, draft_len = self._draft(slots)
        logits = self._forward(slots, draft_ids, draft_len)
        temperature = torch.tensor([self.running[s].temperature for s in slots], device=self.device)
        lengths = torch.tensor(draft_len, device=self.device)
        accepted, own = verify(logits, draft_ids[:, : logits.shape[1] - 1], lengths, temperature)
        drafts = draft_ids.tolist()
        for row, slot in enumerate(slots):
            n, token = int(accepted[row]), int(own[row])
            self._take(slot, [*drafts[row][:n], token], draft_len[row])
        self.steps += 1
        return True

    def _take(self, slot: int, new: list[int], drafted: int) -> None:
        """Append what a step made of a request, up to its end."""
        request = self.running[slot]
        end = next((i + 1 for i, token in enumerate(new) if token in self.end_tokens), len(new))
        taken = new[:end]
        request.accepted += min(len(new) - 1, end)
        if end == len(new):  # else the drafts after the end were not verified
            request.rejected += drafted - (len(new) - 1)
        request.output += taken
        self.generated += len(taken)
        self.computed[slot] = self.lengths[slot] + len(new) - 1  # the cache goes back to here
        self._append(slot, taken)
        self.sampled[slot] = len(taken)
        if slot in self.loops:
            self.loops[slot].push(taken)
        if taken[-1] in self.end_tokens or len(request.output) >= request.max_new_tokens:
            self.drafter.remove(slot)
            del self.running[slot]
            self.free.append(slot)
            if slot in self.loops:
                self.loops.pop(slot).stop()

    def run(self, requests: Sequence[Request]) -> None:
        """Serve all of them to their ends."""
        for request in requests:
            self.add(request)
        while self.step():
            pass
        rate = self.generated / max(self.steps, 1)
        print(f"{self.generated} tokens in {self.steps} steps: {rate:.2f} tokens a step")


def verify(
    logits: torch.Tensor, draft_ids: torch.Tensor, draft_len: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling against drafts that were not sampled: the output is distributed as without them.

    A draft token is accepted with the probability p that the model gives it. At the first that is not,
    the model's own token is drawn from what is left of p without it; after an accepted draft, from p.
    Greedy is p of 0 and 1.

    Args:
        logits: [B, 1 + D, vocab] float32, after the last token and after each draft token.
        draft_ids: [B, D] int64, with padding.
        draft_len: [B] int64.
        temperature: [B] float32; 0 is greedy.

    Returns:
        How many draft tokens are accepted [B], and the model's own token after them [B].
    """
    greedy = torch.zeros_like(logits).scatter_(2, logits.argmax(-1, keepdim=True), 1.0)
    scaled = (logits / temperature.clamp(min=1e-6)[:, None, None]).softmax(-1)
    p = torch.where(temperature[:, None, None] > 0, scaled, greedy)
    batch = torch.arange(len(p), device=p.device)
    p_draft = p[:, :-1].gather(2, draft_ids[..., None]).squeeze(2)  # [B, D]
    is_drafted = torch.arange(draft_ids.shape[1], device=p.device) < draft_len[:, None]
    is_accepted = is_drafted & (torch.rand_like(p_draft) < p_draft)
    accepted = is_accepted.long().cumprod(1).sum(1)
    left = p[batch, accepted]
    refuted = torch.nn.functional.pad(draft_ids, (0, 1)).gather(1, accepted[:, None])
    without = left.scatter(1, refuted, 0.0)
    left = torch.where((accepted < draft_len)[:, None], without, left)
    return accepted, torch.multinomial(left, 1).squeeze(1)


def main(name: str, draft_name: str | None = None) -> None:
    """Edit a text with a model of transformers, with and without a prediction, in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name] if draft_name is None else [name, draft_name]
    model, *drafting = (AutoModelForCausalLM.from_pretrained(each).to(device) for each in names)

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    text = "def total(items):\n    return sum(item.price for item in items)\n"
    prompt, prediction = encode([f"Repeat, with price renamed to cost:\n{text}\n", text])
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    recipes = RecipePack.load().tokenize(encode)
    engine = Engine(model, recipes=recipes, end_tokens=end, draft_model=drafting[0] if drafting else None)
    requests = [Request(prompt, prediction=prediction), Request(prompt, temperature=0.7)]
    engine.run(requests)
    for request in requests:
        print(
            f"{request.accepted} accepted, {request.rejected} rejected: {tokenizer.decode(request.output)!r}"
        )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python engine.py MODEL [DRAFT_MODEL]  (names on Hugging Face, or folders)")
    main(*sys.argv[1:])
