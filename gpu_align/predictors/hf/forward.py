"""`DraftForward`: drafts through a model of transformers, a pass each, and a cache that forgets refuted tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationMixin, cache_utils
from transformers.generation.utils import ALL_CACHE_NAMES

#: Layers that `DraftForward.keep` crops itself: their own `crop` fails where the window is full.
_WINDOW = cache_utils.DynamicSlidingWindowLayer

#: The argument and the output that hold the cache: "past_key_values", since transformers 5.24 "cache".
CACHE_NAME = ALL_CACHE_NAMES[0]
#: What says which tokens to feed: ``cache_position``, or, in newer versions, ``next_sequence_length``.
_PREPARATION = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
#: Arguments of ``forward`` with an entry a token, in the last dimension.
GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


class DraftForward:
    """Runs one sequence through a model, a draft at a time, with inputs that transformers prepares::

        forward = DraftForward(model, input_ids, model_kwargs, output_attentions=False, ...)
        outputs = forward(ids, draft)      # logits after ids, and after each token of the draft
        forward.keep(ids)                  # ids by now: what was accepted, and one token more

    Tokens that the cache holds are not fed again, and `keep` makes it forget those that were refuted. `steps`
    counts passes; `failure` says why no draft can be verified, or is None.

    A cache that holds the whole prompt forgets its last token, which is read again for its logits.

    ValueError, by the first pass at the latest: inputs other than token ids, or a model that is fed other tokens
    than the sequence, computes fewer logits than it is asked for, or has no cache that holds the sequence.
    """

    def __init__(
        self, model: Any, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], **outputs: bool
    ) -> None:
        self._model, self._name = model, type(model).__name__
        self._kwargs = {**model_kwargs, **{k: True for k, wanted in outputs.items() if wanted}}
        self._growing = {k: v for k in GROWING if (v := model_kwargs.get(k)) is not None}
        given, _ = self._kwargs.pop(CACHE_NAME, None), self._kwargs.pop("cache_position", None)
        tensors = {k for k, v in self._kwargs.items() if isinstance(v, torch.Tensor)}
        if unknown := ", ".join(sorted(tensors.difference(GROWING))):
            raise ValueError(f"generate: expected a prompt of token ids alone, found {unknown}")
        self._use_cache: bool = model_kwargs.get("use_cache") is not False
        self.cache: Any = given if self._use_cache else None
        if self.cache is not None and not hasattr(self.cache, "get_seq_length"):
            raise TypeError(f"{CACHE_NAME}: expected a Cache, found {type(self.cache).__name__}")
        #: Of each layer with a window, before a pass with a draft: keys, values and the number of tokens seen.
        self._windows: dict[int, tuple[Any, Any, int]] = {}
        config = model.config.get_text_config()
        mask = self._growing.get("attention_mask")
        self._rope_change = _rope_change(config, 0 if mask is None else int((mask == 0).sum()))
        self.failure = None if self.cache is None else _why_not_forgetting(self.cache)
        #: Tokens whose keys and values the cache holds.
        self._cached = 0 if self.cache is None else int(self.cache.get_seq_length())
        num_tokens, windows = input_ids.shape[1], [x for x in self._layers if type(x) is _WINDOW]
        full = any(layer.cumulative_length >= layer.sliding_window for layer in windows)
        if self.cache is not None and self._cached == num_tokens and self.failure is None and not full:
            self.cache.crop(-1)
            self._cached -= 1
        if self._cached >= num_tokens:
            expected = f"more tokens than the {self._cached} of {CACHE_NAME}"
            raise ValueError(f"input_ids: expected {expected}, found {num_tokens}")
        self._end = self._cached
        self.steps = 0

    def __call__(self, ids: torch.Tensor, draft: Sequence[int]) -> Any:
        """One pass; ids: [1, n] int64, all so far. The output's last ``len(draft) + 1`` logits are wanted."""
        tokens = torch.cat([ids, ids.new_tensor([list(draft)])], dim=1) if draft else ids
        self._end = tokens.shape[1]
        inputs = self._inputs(tokens)
        # The first pass asks for one more than the last, to see that the model can compute it.
        num_logits = len(draft) + 1
        if self.steps == 0:
            num_logits = max(num_logits, min(2, self._end - self._cached))
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        for layer in self._layers if draft else ():
            if type(layer) is _WINDOW:
                seen = int(layer.cumulative_length)
                self._windows[id(layer)] = (layer.keys, layer.values, seen) if seen else (None, None, 0)
        outputs = self._model(**inputs, return_dict=True)
        if outputs.logits.shape[1] < num_logits:
            raise self._unfit(f"computes the logits of {outputs.logits.shape[1]} tokens, not of {num_logits}")
        self.steps += 1
        # A prompt goes into a cache that is not known yet, and some classes make a new one later.
        if self._use_cache and (self.steps == 1 or outputs.get(CACHE_NAME) not in (None, self.cache)):
            self._take_cache(outputs, tokens)
        return outputs

    def _inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        """The inputs that transformers passes to the model for those of `tokens` [1, n] that the cache lacks."""
        end, pending = tokens.shape[1], tokens.shape[1] - self._cached
        more: dict[str, Any] = {name: self._extended(name, end) for name in self._growing}
        if self.cache is not None:
            more[CACHE_NAME] = self.cache
        if "next_sequence_length" in _PREPARATION:
            more["next_sequence_length"] = pending if self._cached else None
        if "cache_position" in _PREPARATION:
            more["cache_position"] = torch.arange(self._cached, end, device=tokens.device)
        if "is_first_iteration" in _PREPARATION:
            more["is_first_iteration"] = self.steps == 0
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(tokens, **{**self._kwargs, **more})
        fed = inputs.get("input_ids")
        # Values are compared once, as it makes the host wait.
        if fed is None or fed.shape[1] not in (pending, end) or (
            self.steps == 0 and not fed.equal(tokens[:, -fed.shape[1] :].to(fed.device))
        ):  # fmt: skip
            raise self._unfit("is fed other inputs than the tokens of the sequence")
        return inputs

    def _extended(self, name: str, end: int) -> torch.Tensor:
        """A growing argument for the first `end` tokens: as it was given, then what `model.generate` appends."""
        given: torch.Tensor = self._growing[name]
        if given.shape[-1] < end:
            more = end - given.shape[-1] + 256  # what follows does not depend on tokens
            if name == "position_ids":
                added = given[..., -1:] + torch.arange(1, more + 1, dtype=given.dtype, device=given.device)
            elif name == "token_type_ids":  # mostly the last again, but not for every class
                asked = {name: given, "cache_position": given[0]}
                asked = self._model._update_model_kwargs_for_generation({}, asked)
                added = asked[name][:, -1:].expand(-1, more)
            else:
                added = given.new_full((1, more), name == "attention_mask")
            self._growing[name] = given = torch.cat([given, added], dim=-1)
        return given[..., :end]

    def _take_cache(self, outputs: Any, tokens: torch.Tensor) -> None:
        """Take the cache that a pass over all `tokens` has left, and see what it holds."""
        kept = next((name for name in ALL_CACHE_NAMES if outputs.get(name) is not None), CACHE_NAME)
        cache = outputs.get(kept, self.cache)
        if kept != CACHE_NAME or not (cache is None or hasattr(cache, "get_seq_length")):
            raise self._unfit(f"keeps {kept} in place of a cache")
        # The fullest layer says it: one without attention may count no tokens.
        counting = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")]
        counting = counting or ([] if cache is None else [cache])
        if max((int(layer.get_seq_length()) for layer in counting), default=0) >= self._end:
            self.cache, self.failure = cache, _why_not_forgetting(cache)
            if self.steps == 1 and self.failure is None:  # will it be fed a draft, too?
                self._cached, cached = self._end, self._cached
                self._inputs(torch.cat([tokens, tokens[:, -1:], tokens[:, -1:]], dim=1))
                self._cached = cached
        elif self.steps > 1:
            self.cache, self.failure = cache, f"{self._name} dropped its cache"
        else:
            # No cache is filled: right if all tokens are fed in each pass, which transformers does not see to.
            self._cached = self._end
            following = self._inputs(torch.cat([tokens, tokens[:, -1:]], dim=1))
            if following["input_ids"].shape[1] <= self._end:
                raise self._unfit("fills no cache, and reads one token without it; pass use_cache=False")
            self._use_cache, self._cached, self.failure = False, 0, None

    def _unfit(self, why: str) -> ValueError:
        return ValueError(f"model: expected a model that verifies drafts, found {self._name}, which {why}")

    @property
    def _layers(self) -> list[Any]:
        return getattr(self.cache, "layers", []) if self._use_cache else []

    def room(self, length: int) -> int | None:
        """The most draft tokens that a pass after `length` tokens may have; None is any number."""
        if self.failure is not None or (self._use_cache and self.cache is None):
            return 0  # a cache that the model makes in its first pass is not known before
        pending = length - self._cached
        rooms = [layer.sliding_window - 1 - pending for layer in self._layers if type(layer) is _WINDOW]
        if self._rope_change is not None:
            change, always = self._rope_change
            if always or self._cached <= change:
                rooms.append(change - length)
        return max(0, min(rooms)) if rooms else None

    def keep(self, ids: torch.Tensor) -> None:
        """Forget the tokens of the last pass that are not in ``ids[:, :-1]``; the last one was not fed yet."""
        if not self._use_cache:
            return
        length, end = min(ids.shape[1] - 1, self._end), self._end
        self._cached = length
        if length == end:
            return
        if _WINDOW not in map(type, self._layers):
            self.cache.crop(length - end)  # negative: so many tokens less
            return
        for layer in self._layers:
            if type(layer) is _WINDOW:
                _rewind_window(layer, *self._windows[id(layer)], length, end)
            else:
                layer.crop(length - end)


def _rope_change(config: Any, padding: int) -> tuple[int, bool] | None:
    """Beyond how many tokens other rotary frequencies are used, and whether each longer pass has its own."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (rope, *rope.values()):
        kind = str(entry.get("rope_type", entry.get("type"))) if isinstance(entry, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            name, most = "original_max_position_embeddings", config.max_position_embeddings
            original = most if "dynamic" in kind else entry.get(name, getattr(config, name, most))
            return original + padding, "dynamic" in kind
    return None


def _why_not_forgetting(cache: Any) -> str | None:
    """Why a cache cannot forget its last tokens, or None where it can.

    A class that adds a way to store (a method ``update...``) must say how to forget (``crop``) itself, or a class
    derived from it must: an inherited `crop` does not know what was added.
    """
    base = cache_utils.Cache
    for kept in (cache, *getattr(cache, "layers", ())):
        kind = type(kept)
        if kind is _WINDOW:
            continue
        depth = {name: i for i, c in reversed([*enumerate(kind.__mro__)]) for name in vars(c)}
        stores = min((i for name, i in depth.items() if name.startswith("update")), default=-1)
        if kept is not cache:  # a layer that has to record the past is not told to
            says = "activate_past_recording" not in depth and getattr(kept, "is_croppable", True)
        elif hasattr(base, "is_croppable"):  # by default what its layers say
            says = kind.is_croppable is base.is_croppable or kept.is_croppable
        else:
            says = kind.crop is base.crop
        if not says or depth.get("crop", len(depth)) > stores:
            return f"a {kind.__name__} of the cache cannot forget"
    return None


def _rewind_window(layer: Any, keys: Any, values: Any, seen: int, length: int, end: int) -> None:
    """Forget tokens ``length <= i < end`` of a pass; keys, values: of the `seen` tokens before it, or None."""
    window = layer.sliding_window - 1
    for name, before in (("keys", keys), ("values", values)):
        now = getattr(layer, name)
        first = min(end, now.shape[2]) - (end - seen)  # room() lets all that was fed fit in
        stored = now[:, :, first : first + length - seen]
        if before is not None:
            stored = torch.cat([before[:, :, : min(seen, window)], stored], dim=2)
        setattr(layer, name, stored[:, :, -window:])
    layer.cumulative_length = length
