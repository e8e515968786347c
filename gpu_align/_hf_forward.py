"""Forward passes of a transformers model over a draft, and its KV cache rolled back, for transformers 4.56 to 5.

`gpu_align.hf` is the only user. The model is called with arguments of its public ``forward``; what differs between
the versions is which of them it takes and what a cache layer keeps beside its tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpu_align._hf_cache import Rewind

#: Arguments of ``forward`` that are made here for each pass.
_MADE_HERE = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep",
}  # fmt: skip


class DraftForward:
    """Runs one sequence through a model, a draft at a time::

        forward = DraftForward(model, input_ids, model_kwargs, output_attentions=False, ...)
        outputs = forward(ids, draft)      # logits behind ids, and behind each token of the draft
        forward.keep(ids)                  # ids by now: what was accepted, and one token more

    Tokens that the cache holds are not fed again, and `keep` makes it forget those that were refuted.

    Args:
        model: a decoder-only model.
        input_ids: [1, n] int64: the prompt.
        model_kwargs: as ``generate`` gives them to a decoding loop.
        outputs: more arguments for each pass, such as ``output_attentions=True``.

    Attributes:
        steps: passes so far.
        failure: why no draft can be verified, or None.
        cache: the model's cache, or None.

    Raises:
        ValueError: `model_kwargs` holds tensors of a kind that is not known here, or an empty remainder to feed.
        TypeError: a cache that is not one of transformers' own classes.
    """

    def __init__(
        self, model: Any, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], **outputs: bool
    ) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._prompt_len: int = input_ids.shape[1]
        self._mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        self._given_positions: torch.Tensor | None = model_kwargs.get("position_ids")
        self._use_cache: bool = model_kwargs.get("use_cache") is not False
        self.cache: Any = model_kwargs.get("past_key_values") if self._use_cache else None
        more = {name: value for name, value in model_kwargs.items() if name not in _MADE_HERE}
        if unknown := [name for name, value in more.items() if isinstance(value, torch.Tensor)]:
            raise ValueError(f"generate: expected a prompt of token ids alone, found {', '.join(unknown)}")
        if self._given_positions is not None and self._given_positions.ndim != 2:
            raise ValueError("position_ids: expected the shape [1, n], found more dimensions")
        self._rewind = Rewind(self.cache) if self.cache is not None else None
        self.failure = self._rewind.reason_against() if self._rewind is not None else None
        self._fixed = {name: value for name, value in more.items() if name in self._takes}
        self._fixed |= {name: True for name, wanted in outputs.items() if wanted}
        #: Tokens whose keys and values the cache holds.
        self._cached = 0 if self.cache is None else int(self.cache.get_seq_length())
        if self._cached >= self._prompt_len:
            raise ValueError(
                f"input_ids: expected more tokens than the {self._cached} of past_key_values, "
                f"found {self._prompt_len}"
            )
        self._end = self._cached
        self.steps = 0

    def __call__(self, ids: torch.Tensor, draft: Sequence[int]) -> Any:
        """One pass. Returns the model's output, whose last ``len(draft) + 1`` logits are those wanted.

        Args:
            ids: [1, n] int64: all tokens so far.
            draft: token ids to verify.
        """
        fed = torch.cat([ids[:, self._cached :], ids.new_tensor([list(draft)])], dim=1) if draft else (
            ids[:, self._cached :]
        )  # fmt: skip
        self._end = ids.shape[1] + len(draft)
        arguments: dict[str, Any] = {"input_ids": fed, "use_cache": self._use_cache, **self._fixed}
        mask = self._mask_until(self._end)
        if mask is not None:
            arguments["attention_mask"] = mask
        if "position_ids" in self._takes:
            arguments["position_ids"] = self._positions(mask, fed.device)
        if "cache_position" in self._takes:
            arguments["cache_position"] = torch.arange(self._cached, self._end, device=fed.device)
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = len(draft) + 1
        if self.cache is not None:
            arguments["past_key_values"] = self.cache
        if draft and self._rewind is not None:
            self._rewind.remember()
        outputs = self._model(**arguments, return_dict=True)
        self.steps += 1
        return outputs

    def room(self, ids: torch.Tensor) -> int | None:
        """The most draft tokens that a pass behind `ids` may have; None is any number."""
        if self.failure is not None:
            return 0
        length = ids.shape[1]
        return None if self._rewind is None else self._rewind.room(length, length - self._cached)

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has its full length from the start."""
        return self._rewind is not None and self._rewind.is_preallocated

    def keep(self, ids: torch.Tensor) -> None:
        """Forget the tokens of the last pass that are not in ``ids[:, :-1]``; the last one was not fed yet."""
        if self._rewind is None:
            return
        self._cached = min(ids.shape[1] - 1, self._end)
        if self._cached < self._end:
            self._rewind.forget(self._cached, self._end)

    def _mask_until(self, end: int) -> torch.Tensor | None:
        if self._mask is None or "attention_mask" not in self._takes:
            return None
        more = self._mask.new_ones((1, end - self._mask.shape[1]))
        return torch.cat([self._mask, more], dim=1)

    def _positions(self, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """[1, fed] int64: given for the prompt, or counted where the mask is 1, and one more for each token."""
        given = self._given_positions
        if given is not None:
            behind = given[:, -1:] + torch.arange(1, self._end - self._prompt_len + 1, device=device)
            positions = torch.cat([given, behind], dim=1)
        elif mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp_(min=0)
        else:
            positions = torch.arange(self._end, device=device)[None]
        return positions[:, positions.shape[1] - (self._end - self._cached) :]
