"""`Drafter`: aligns the predictions of a whole batch with what the model writes, and drafts from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ..ops import layout
from ..ops.backend import Backend, check_batch, check_tensor, resolve_backend
from ..ops.choose import MAX_DRAFT_TOKENS
from ..ops.errors import check_int, check_temperature, check_type
from ..ops.index import append
from ..ops.layout import Draft, TextKind, allocate_draft, allocate_state
from ..ops.match import MAX_CONTEXT_LEN
from ..ops.recipes.table import Recipes
from ..ops.step import make_step
from . import arena
from .admission import Admission, rules_of
from .arena import ArenaStats, ArenaText
from .checks import Integers, check_device, check_integers, check_token_ids
from .config import DrafterConfig
from .survival import HIGH_TEMPERATURE

#: What the kernel can count: lanes of a draft, positions as parts of 32-bit keys, and the rest in 32 bits.
_MOST = {
    "max_slots": 2**31 - 1,
    "max_context_len": MAX_CONTEXT_LEN,
    "max_prediction_len": arena.MAX_PREDICTION_LEN,
    "num_draft_tokens": MAX_DRAFT_TOKENS,
    "vocab_size": layout.FIRST_GAP,
    "max_prediction_tokens": arena.MAX_TOKENS // layout.PAGE * layout.PAGE,
}


def check_size(name: str, size: int | None) -> int:
    return check_int(name, size, 1, _MOST[name])


Method = TypeVar("Method", bound=Callable[..., Any])


def on_its_device(method: Method) -> Method:
    """A method of `Drafter`, run while the drafter's GPU is the current one: Triton launches on that."""

    @wraps(method)
    def run(self: Drafter, *args: Any, **kwargs: Any) -> Any:
        if not self._is_cuda or self.device.index == torch.cuda.current_device():
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Drafter:
    """Drafts for up to `max_slots` requests at a time, from their predictions and their own contexts.

    The loop that an engine runs::

        drafter = Drafter(token_ids, total_len, ...)           # its own tensors, a row a slot
        drafter.add(slot, prediction, prompt_len)              # when a request arrives
        while generating:
            draft = drafter.propose(slots, num_sampled)
            ...                                                # verify, append what was accepted to the rows
        drafter.remove(slot)                                   # when it is finished

    An engine without such tensors gives sizes in their place, and tokens: ``add(slot, prediction,
    context=prompt)`` and ``propose(slots, num_sampled, new_tokens)``. For lists of tokens there is `ListDrafter`.

    A step is one kernel, and the data that it reads does not grow with the prediction, which `add` indexes once.

    A draft is a function of the prediction and the tokens so far (and of the sizes below: how many positions of a
    context are remembered depends on `max_context_len`). What a slot holds is a cache of that, and it does not
    matter how the tokens were split over steps. Tokens of a slot that `propose` has seen must not change until
    `add` is called for it again; `total_len` may shrink (the slot then starts over).

    Args:
        token_ids: [max_slots, max_context_len] int32, rows contiguous: prompt and output so far, one row a slot.
        total_len: [max_slots] int32: tokens valid in each row, ``0 <= total_len <= max_context_len``.
        max_slots, max_context_len: in place of the two: the drafter makes `token_ids` and `total_len` of these
            sizes. The engine writes to them, or lets the drafter.
        max_prediction_len: longest prediction.
        num_draft_tokens: K, the most drafts a step, up to 256.
        vocab_size: token ids are below it.
        device: with sizes; None is "cuda", which runs the kernel. On "cpu" the reference implementation runs, with
            the same results. Numba, where it is installed, compiles it here, or loads what it compiled before.
        config: a `DrafterConfig`.
        recipes: what to draft where neither the prediction nor the context promises more, `RecipePack.tokenize`
            for this model's tokenizer; None is nothing. Drafters of one device, K, vocabulary and
            `min_survival_recipe` that are given the same object share one table in its memory.
        backend: "auto" goes by the device; "triton" on the CPU runs the kernel under Triton's interpreter.
        max_prediction_tokens: tokens of all predictions held together, rounded up to whole pages of 256 for each.
            None is enough to never refuse one: about twice ``max_slots * max_prediction_len``.

    Memory on the device: 12 bytes a token of `max_prediction_tokens` (the tokens and their index), and a slot 4 to
    8 bytes a token of `max_context_len` (the index of its context, 32 KB at least) and 0.5 KB; about 400 bytes a
    recipe. On the host: 4 bytes a token of the predictions that are held, and for a GPU up to 12 MB of pinned
    memory, more for texts over a million tokens.

    Streams: `propose`, `flush`, `warm_up`, `capture` and a replay run on the current stream, `add` and `remove` on
    none. Write the rows on that stream, too, or let it wait for what writes them. Not thread-safe.

    TypeError, ValueError: an argument of another type, a size below 1 or above what the kernel can count, a device
    that is not there, or a backend that cannot run on it.
    """

    @torch.inference_mode(False)  # tensors of that mode cannot be written to outside of it
    def __init__(
        self,
        token_ids: torch.Tensor | None = None,
        total_len: torch.Tensor | None = None,
        *,
        max_prediction_len: int,
        num_draft_tokens: int,
        vocab_size: int,
        max_slots: int | None = None,
        max_context_len: int | None = None,
        device: torch.device | str | None = None,
        config: DrafterConfig | None = None,
        recipes: Recipes | None = None,
        backend: Backend = "auto",
        max_prediction_tokens: int | None = None,
    ) -> None:
        if token_ids is None and total_len is None:
            max_slots = check_size("max_slots", max_slots)
            max_context_len = check_size("max_context_len", max_context_len)
            device = check_device("cuda" if device is None else device)
        else:
            own = {"max_slots": max_slots, "max_context_len": max_context_len, "device": device}
            for name, value in own.items():
                if value is not None:
                    raise ValueError(f"{name}: expected None beside token_ids, found {value!r}")
            token_ids = check_tensor("token_ids", token_ids, dtype=torch.int32, shape=(None, None))
            max_slots, max_context_len = map(check_size, own, token_ids.shape)
            device = check_device(token_ids.device)
            total_len = check_tensor(
                "total_len", total_len, dtype=torch.int32, shape=(max_slots,), device=token_ids.device
            )
        self.max_slots, self.max_context_len = max_slots, max_context_len
        self.max_prediction_len = max_prediction_len = check_size("max_prediction_len", max_prediction_len)
        self.num_draft_tokens = num_draft_tokens = check_size("num_draft_tokens", num_draft_tokens)
        self.vocab_size = vocab_size = check_size("vocab_size", vocab_size)
        if max_prediction_tokens is None:
            max_prediction_tokens = arena.tokens_for_all(max_slots, max_prediction_len)
        max_prediction_tokens = check_size("max_prediction_tokens", max_prediction_tokens)
        check_type("config", config, DrafterConfig | None, "a DrafterConfig")
        # A pack is text, and becomes recipes for one model.
        advice = "; call its tokenize(encode)" if hasattr(recipes, "tokenize") else ""
        check_type("recipes", recipes, Recipes | None, "Recipes", advice)
        self.config = config = config if config is not None else DrafterConfig()

        self._arena = arena.PredictionArena(max_prediction_tokens)
        self._texts: dict[int, ArenaText] = {}
        #: Slots that draft from earlier answers, the oldest first.
        self._memories: dict[int, None] = {}
        self._state = allocate_state(max_slots, max_context_len, self._arena.num_tokens, device)
        self.device = device = self._state.prediction_tokens.device  # with its index
        self._is_cuda = device.type == "cuda"
        self._tables = config.tables_for(num_draft_tokens, device)
        recipes = recipes if recipes is not None else Recipes.from_lists([])
        #: Names of the recipe packs that a request may choose from.
        self.recipe_names = recipes.names
        self._pack_bits = recipes.pack_bits
        self._recipes = recipes.table(num_draft_tokens, device, config.min_survival_recipe, vocab_size)
        self._draft = allocate_draft(max_slots, num_draft_tokens, device)
        #: The first rows of it, by batch size.
        self._drafts: dict[int, Draft] = {}
        self._settings = config.step_settings(vocab_size, max_context_len)
        self._backend = resolve_backend(backend, self._state.prediction_tokens)
        #: Under Triton's interpreter; the reference looks itself.
        self._checks_values = self._backend == "triton" and not self._is_cuda
        if token_ids is None or total_len is None:
            token_ids = torch.zeros((max_slots, max_context_len), dtype=torch.int32, device=device)
            total_len = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self.token_ids, self.total_len = rows = token_ids, total_len
        self._step = make_step(
            self._backend, self._state, self._tables, self._recipes, self._draft, self._settings, *rows
        )
        self._admission = Admission(
            self._state, *rows, self._settings.context_shift, max_prediction_len, self._backend,
            config.use_context,
        )  # fmt: skip

    def add(
        self,
        slot: int,
        prediction: Integers,
        prompt_len: int | None = None,
        *,
        context: Integers | None = None,
        sharing_key: Hashable = None,
        recipes: Collection[str] | None = None,
        kind: TextKind = TextKind.PREDICTION,
        end_tokens: Integers = (),
        temperature: float = 0.0,
    ) -> bool:
        """Give `slot` to a new request. Whatever the slot knew is forgotten.

        Args:
            slot: ``0 <= slot < max_slots``; an occupied slot is overwritten.
            prediction: token ids of the predicted output, ``0 <= id < vocab_size``, and gaps of
                `gpu_align.texts.skeletons.join` and `several.joined`; may be empty. A sequence of integers, an
                array or a tensor on the CPU, of one dimension.
            prompt_len: tokens of its row that are prompt, ``0 <= prompt_len <= max_context_len``: the output,
                with which the prediction is aligned, begins there. None: all of `context`.
            context: token ids for the drafter to write to its row: the prompt, and the output so far of a request
                that was preempted. None: the engine writes them.
            sharing_key: requests that bring an equal prediction with an equal key share its memory; without keys
                all do. Drafts do not depend on it.
            recipes: names of the recipe packs that this request uses, of `recipe_names`; None is all.
            kind: of the text that is given as the prediction: a `TextKind`, such as `ResponseMemory.recall_for`
                says of earlier answers. Drafts from any but `TextKind.PREDICTION` have `Source.MEMORY`, and none
                is made before the output has matched it; where a later prediction finds no room such a text gives
                way, the oldest first.
            end_tokens: token ids that end the request: no draft goes on after one. Ids outside the vocabulary are
                ignored, and of the others those after the eighth.
            temperature: of its sampling, finite, 0 for greedy. From 0.85 on confidences are lower. From 0.3 on a
                prediction of `several.joined` is samples of one prompt, drafted from by tables learned on such;
                else drafts do not depend on it.

        Returns:
            Whether the prediction is held. False: there was no room for it, and the request gets drafts from its
            own context alone (`prediction_stats` counts these).

        This writes to the host's memory alone; the next `propose` or `flush` sends all that has come by then, by
        one kernel. A prediction that is held already with the same `sharing_key` is shared, which takes less
        time; with another key it is sent and indexed as if it were not there.

        TypeError, ValueError: an argument of another type or outside its domain. The slot is then as it was.
        """
        slot = self._check_slot(slot)
        written = None
        if context is not None:
            most = self.max_context_len
            written = check_token_ids("context", context, 2**31, most=most).astype(np.int32)
            prompt_len = len(written) if prompt_len is None else prompt_len
        prompt_len = check_int("prompt_len", prompt_len, 0, self.max_context_len)
        ids = check_token_ids(
            "prediction", prediction, self.vocab_size, layout.FIRST_GAP, self.max_prediction_len
        )
        if sharing_key is not None:
            try:
                hash(sharing_key)  # a tuple is a Hashable, whatever is in it
            except TypeError:
                raise TypeError(
                    f"sharing_key: expected a hashable value, found {sharing_key!r}"[:200]
                ) from None
        check_type("kind", kind, TextKind, "a TextKind")
        if isinstance(recipes, str) or not (recipes is None or isinstance(recipes, Iterable)):
            found = f"the str {recipes!r}" if isinstance(recipes, str) else type(recipes).__name__
            raise TypeError(f"recipes: expected names of packs, found {found}")
        ends = check_integers("end_tokens", end_tokens).tolist() if len(end_tokens) else ()
        check_temperature(temperature)
        packs = self._pack_bits(recipes)
        # The key's own code runs here, before anything changes.
        text = self._arena.find(ids.astype(np.int32, copy=False), sharing_key)
        self._release(slot)
        try:
            if self._memories and kind == TextKind.PREDICTION:
                self._make_room(text)
            is_fresh = not text.is_held
            is_held = self._arena.take(text)
        except BaseException:
            self._admission.vacate(slot)
            raise
        if is_held:
            self._texts[slot] = text
            if kind != TextKind.PREDICTION:
                self._memories[slot] = None
        self._admission.occupy(
            slot, text if is_held else arena.NO_TEXT, prompt_len, is_fresh=is_fresh,
            recipe_packs=packs, rules=rules_of(kind, ids if is_held else ids[:0], temperature),
            is_hot=bool(temperature >= HIGH_TEMPERATURE),
            end_tokens=[end for end in ends if 0 <= end < self.vocab_size], context=written,
        )  # fmt: skip
        return is_held

    def _make_room(self, text: ArenaText) -> None:
        """Earlier answers that others draft from give way to a prediction, the oldest first, if that is of use."""
        has_room = partial(self._arena.has_room, text)
        if has_room() or not has_room(without=[self._texts[slot] for slot in self._memories]):
            return
        while not has_room():
            slot = next(iter(self._memories))
            self._release(slot)
            self._admission.take_prediction(slot)

    def remove(self, slot: int) -> None:
        """Free `slot`: it gets no drafts until the next `add`. Freeing a free slot does nothing."""
        slot = self._check_slot(slot)
        self._release(slot)
        self._admission.vacate(slot)

    @property
    def prediction_stats(self) -> ArenaStats:
        """How the room for predictions is used, and what it could not hold."""
        return self._arena.stats()

    def _release(self, slot: int) -> None:
        if self._memories:
            self._memories.pop(slot, None)
        if (text := self._texts.pop(slot, None)) is not None:
            self._arena.release(text)

    @on_its_device
    def flush(self) -> None:
        """Send what `add` and `remove` have staged, on the current stream. `propose` and `CapturedStep.replay` do
        it themselves; call it before you replay a graph of your own that holds a `propose`."""
        self._admission.flush()

    @on_its_device
    def propose(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, new_tokens: torch.Tensor | None = None
    ) -> Draft:
        """Draft the next tokens of every request in the batch.

        Args:
            slots: [B] int64: batch position -> slot, ``0 <= slot < max_slots``, ``B <= max_slots``; no slot twice
                where num_sampled > 0.
            num_sampled: [B] int32: tokens sampled this step; 0 means that the request is still in its prefill:
                nothing about it changes and its draft has length 0.
            new_tokens: [B, N] int64, rows contiguous: the first `num_sampled` of each are written to the request's
                row, and `total_len` grows by as many. None: the engine has done so.

        A request's output is ``token_ids[slot, prompt_len:total_len]``, with the `prompt_len` of `add`, and empty
        where ``total_len <= prompt_len``. An empty output is the beginning of every prediction: if num_sampled > 0
        even so, the draft is the first tokens of the prediction, or, without one, from the context or a recipe.

        Returns:
            `Draft` for B requests: views of the drafter's own buffers, which the next call rewrites. A slot that
            holds no request gets length 0.

        On CUDA nothing is allocated, copied to the host or waited for after the first call, which compiles the
        kernels; the call can be captured in a CUDA graph, one for each B. Values inside the tensors are only
        checked on the CPU. On CUDA a `total_len` outside its domain counts as the nearest one inside, and tokens
        beyond the row or `new_tokens` are not written; of a slot
        that is there twice with num_sampled > 0 no draft means anything until its next `add`; with a slot outside
        its domain memory outside of the drafter's is read and written.

        TypeError, ValueError: an argument differs from the above; of values only on the CPU.
        """
        check_tensor("slots", slots, dtype=torch.int64, shape=(None,), device=self.device)
        batch_size = slots.shape[0]
        check_tensor("num_sampled", num_sampled, dtype=torch.int32, shape=(batch_size,), device=self.device)
        if batch_size > self.max_slots:
            raise ValueError(f"slots: expected at most {self.max_slots}, found {batch_size}")
        if new_tokens is not None:
            shape = batch_size, None
            check_tensor("new_tokens", new_tokens, dtype=torch.int64, shape=shape, device=self.device)
        is_busy = self._admission.is_busy and not (self._is_cuda and torch.cuda.is_current_stream_capturing())
        rows = self.token_ids, self.total_len
        if is_busy:
            self._admission.flush()
        if self._checks_values or (new_tokens is not None and not self._is_cuda):
            check_batch(*rows, slots, num_sampled, new_tokens)
        if is_busy:
            self._admission.enter_new(slots, num_sampled)
        if new_tokens is not None:
            append(*rows, slots, num_sampled, new_tokens, self._backend)
        self._step(slots, num_sampled)
        draft = self._drafts.get(batch_size)
        if draft is None:
            self._drafts[batch_size] = draft = Draft(*(tensor[:batch_size] for tensor in self._draft))
        return draft

    @on_its_device
    def warm_up(self) -> None:
        """Run once what a request runs, so that nothing is compiled or pinned when the first one comes. No slot
        changes."""
        # Nothing is sampled: the step leaves the slot as it is.
        slots, num_sampled = (torch.zeros(1, dtype=d, device=self.device) for d in (torch.int64, torch.int32))
        self._admission.warm_up(slots, num_sampled)
        self.propose(slots, num_sampled, torch.zeros((1, 1), dtype=torch.int64, device=self.device))

    @on_its_device
    def capture(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, new_tokens: torch.Tensor | None = None
    ) -> CapturedStep:
        """Record a step over these tensors as a CUDA graph: a replay runs it on what they hold by then.

        Arguments as in `propose`; the graph is for this batch size and keeps the tensors. No state changes here.
        All graphs write to the same `Draft` buffers. `add` and `remove` go on as ever, as long as they run on the
        stream that replays. On the CPU there is no graph, and a replay is a call of `propose`.
        """
        return CapturedStep(self.propose, self._admission, slots, num_sampled, new_tokens)

    def _check_slot(self, slot: int) -> int:
        if type(slot) is int and 0 <= slot < self.max_slots:  # the usual case
            return slot
        return check_int("slot", slot, 0, self.max_slots - 1, f"0 <= slot < {self.max_slots}")


class CapturedStep:
    """A step of a `Drafter` that an engine replays, to `draft`: no arguments, no checks, one launch."""

    def __init__(
        self, propose: Callable[..., Draft], admission: Admission, slots: torch.Tensor, num_sampled: torch.Tensor,
        new_tokens: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self._admission, self._batch = admission, (slots, num_sampled)
        self._propose = partial(propose, slots, num_sampled, new_tokens)
        self._graph: torch.cuda.CUDAGraph | None = None
        # Nothing sampled: the kernel is compiled and runs once, and leaves every slot as it is.
        self.draft = propose(slots, torch.zeros_like(num_sampled), new_tokens)
        if num_sampled.is_cuda:
            torch.cuda.current_stream(num_sampled.device).synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # Whatever other threads do with the device meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._propose()

    def replay(self) -> Draft:
        """Run the step with what the captured tensors hold now."""
        if self._graph is None:
            return self._propose()
        if self._admission.is_busy:
            with torch.cuda.device(self._batch[0].device):
                self._admission.flush()
                self._admission.enter_new(*self._batch)
        self._graph.replay()
        return self.draft
