"""KV caches of transformers 4.56 to 5 that go back by some tokens; `gpu_align._hf_forward` is the only user.

Transformers' own ``crop`` knows only caches that grow, and windows that were told beforehand to record their past. What a
layer of each class needs:

| layer | drafts that it allows | to forget |
|---|---|---|
| grows (`DynamicLayer`) | any | cut off the end |
| preallocated (`StaticLayer`) | any | set its length back |
| window (`DynamicSlidingWindowLayer`, `StaticSlidingWindowLayer`) | a pass of fewer tokens than the window | take back the window of before the pass, add what was accepted |
| window of transformers 4.56, preallocated | up to the end of the first window | set its length back |
| another | none | – |
"""  # noqa: E501 (the table)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import cache_utils

_GROWS = cache_utils.DynamicLayer
_PREALLOCATED = cache_utils.StaticLayer
_WINDOW = cache_utils.DynamicSlidingWindowLayer
#: From transformers 4.57 on.
_STATIC_WINDOW = getattr(cache_utils, "StaticSlidingWindowLayer", None)
#: Before.
_OLD_STATIC_WINDOW = getattr(cache_utils, "SlidingWindowLayer", None)


class _Window(NamedTuple):
    """A window layer before a pass."""

    keys: torch.Tensor | None  # [1, heads, n, head_dim], None where nothing was stored yet
    values: torch.Tensor | None
    total: int  # tokens seen


class Rewind:
    """Makes the layers of a cache forget the last tokens of a pass.

    Args:
        cache: of one sequence.

    Raises:
        TypeError: it is not a ``Cache`` of transformers.
    """

    def __init__(self, cache: Any) -> None:
        if not hasattr(cache, "layers"):
            raise TypeError(f"past_key_values: expected a Cache, found {type(cache).__name__}")
        self._cache = cache
        self._windows: list[tuple[Any, _Window]] = []

    @property
    def is_preallocated(self) -> bool:
        """Whether its layers have their full length from the start."""
        return any(isinstance(layer, _PREALLOCATED) for layer in self._cache.layers)

    def reason_against(self) -> str | None:
        """Why the cache cannot forget at all, or None."""
        known = {_GROWS, _PREALLOCATED, _WINDOW, _STATIC_WINDOW, _OLD_STATIC_WINDOW}
        for layer in self._cache.layers:
            if type(layer) not in known:
                return f"a {type(layer).__name__} of the cache cannot forget"
        return None

    def room(self, length: int, pending: int) -> int | None:
        """The most draft tokens behind `length` tokens, of which the pass feeds `pending`; None is any number."""
        room: int | None = None
        for layer in self._cache.layers:
            kind = type(layer)
            if kind is _WINDOW:
                most = layer.sliding_window - 1 - pending
            elif kind is _STATIC_WINDOW:
                most = layer.max_cache_len - pending
            elif kind is _OLD_STATIC_WINDOW:
                most = layer.max_cache_len - length
            else:
                continue
            room = max(0, most if room is None else min(room, most))
        return room

    def remember(self) -> None:
        """Prepare for a pass with a draft."""
        self._windows = []
        for layer in self._cache.layers:
            if type(layer) is _WINDOW:
                # A pass replaces these tensors.
                stored = layer.keys is not None and layer.cumulative_length > 0
                keys, values = (layer.keys, layer.values) if stored else (None, None)
                self._windows.append((layer, _Window(keys, values, layer.cumulative_length)))
            elif type(layer) is _STATIC_WINDOW:
                # A pass writes into these.
                total = _total(layer)
                keys, values = (layer.keys.clone(), layer.values.clone()) if total else (None, None)
                self._windows.append((layer, _Window(keys, values, total)))

    def forget(self, length: int, end: int) -> None:
        """Forget tokens ``length <= i < end`` of the pass since `remember`."""
        before = {id(layer): window for layer, window in self._windows}
        for layer in self._cache.layers:
            kind = type(layer)
            if kind is _GROWS:
                layer.crop(length - end)  # negative: so many tokens less
            elif kind is _WINDOW:
                _rewind_window(layer, before[id(layer)], length, end)
            elif kind is _STATIC_WINDOW:
                _rewind_static_window(layer, before[id(layer)], length, end)
            elif kind is _OLD_STATIC_WINDOW:
                layer.keys[:, :, length:end].zero_()
                layer.values[:, :, length:end].zero_()
                layer.cumulative_length -= end - length
            elif isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.sub_(end - length)
            else:  # in early versions a static layer counts what is not zero
                layer.keys[:, :, length:end].zero_()
                layer.values[:, :, length:end].zero_()
        self._windows = []


def _rewind_window(layer: Any, before: _Window, length: int, end: int) -> None:
    fed, kept = end - before.total, length - before.total
    stored = layer.keys.shape[-2]
    new = slice(stored - fed, stored - fed + kept)  # room() lets all that was fed fit in
    keys, values = layer.keys[:, :, new], layer.values[:, :, new]
    layer.keys = layer.keys[:, :, :0] if before.keys is None else before.keys
    layer.values = layer.values[:, :, :0] if before.values is None else before.values
    layer.cumulative_length = before.total
    layer.update(keys, values)


def _rewind_static_window(layer: Any, before: _Window, length: int, end: int) -> None:
    fed, kept = end - before.total, length - before.total
    stored = min(end, layer.max_cache_len)
    new = slice(stored - fed, stored - fed + kept)
    window = layer.max_cache_len
    for stored_now, stored_before in ((layer.keys, before.keys), (layer.values, before.values)):
        accepted = stored_now[:, :, new]
        if stored_before is not None:
            accepted = torch.cat([stored_before[:, :, : min(before.total, window)], accepted], dim=2)
        accepted = accepted[:, :, -window:].clone()
        stored_now.zero_()
        stored_now[:, :, : accepted.shape[2]] = accepted
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
        layer.cumulative_length.fill_(min(length, window))  # not used behind the first window
    else:
        layer.cumulative_length = length


def _total(layer: Any) -> int:
    """Tokens that a preallocated window has seen."""
    return int(getattr(layer, "cumulative_length_int", layer.cumulative_length))
