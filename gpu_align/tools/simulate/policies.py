"""The policies the simulator can run, by name."""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
import torch

import gpu_align

from ...config import DrafterConfig
from ...predictors.base import TokenPredictor
from ...predictors.loop import PredictorLoop
from ..policies import OPTIONAL_POLICIES, POLICIES, RECIPE_POLICIES
from ..policies.base import Policy
from ..policies.lookup import suffix_decoding_available
from ..policies.static_text import StaticText
from .packs import NO_PACK, SHIPPED_PACK, recipes_for, tokenizer_of
from .records import Record
from .replay import Drafted, PairResult, PolicyResult, verification_steps
from .tokenizers import line_ending_ids, load_tokenizer


class DrafterPolicy(Policy):
    """One slot of a `Drafter` on the CPU; one `Drafter` serves any number of sequences in turn.

    Args:
        max_context_len: the longest prompt plus output, tokens.
        max_prediction_len: the longest prediction, tokens.
        vocab_size: ids are below it.
        num_draft_tokens: K; `start` must be called with the same.
        config: the drafter's settings; the defaults if None.
        name: the name in reports.
        recipes: the drafter's.
    """

    def __init__(
        self,
        max_context_len: int,
        max_prediction_len: int,
        vocab_size: int,
        num_draft_tokens: int,
        config: gpu_align.DrafterConfig | None = None,
        name: str = "gpu_align",
        recipes: gpu_align.Recipes | None = None,
    ) -> None:
        self.name = name
        self._num_draft_tokens = num_draft_tokens
        self._drafter = gpu_align.Drafter(
            max_slots=1,
            max_context_len=max_context_len,
            max_prediction_len=max_prediction_len,
            num_draft_tokens=num_draft_tokens,
            vocab_size=vocab_size,
            device="cpu",
            config=config,
            recipes=recipes,
        )
        self._token_ids = torch.zeros((1, max_context_len), dtype=torch.int32)
        self._total_len = torch.zeros(1, dtype=torch.int32)
        self._slots = torch.zeros(1, dtype=torch.int64)
        self._num_sampled = torch.ones(1, dtype=torch.int32)
        # The same memory as NumPy sees it: writing a few tokens there costs less than through torch.
        self._row = self._token_ids.numpy()[0]
        self._length = 0
        self._source = 0
        self._confidence: list[float] = []

    @classmethod
    def for_records(
        cls,
        records: Sequence[Record],
        num_draft_tokens: int,
        config: gpu_align.DrafterConfig | None = None,
        name: str = "gpu_align",
        recipes: gpu_align.Recipes | None = None,
    ) -> DrafterPolicy:
        """A policy large enough for every one of `records`."""
        return cls(*sizes_for(records, recipes), num_draft_tokens, config, name, recipes)

    @property
    def source(self) -> int:
        """The `gpu_align.Source` of the last draft."""
        return self._source

    @property
    def confidence(self) -> list[float]:
        """The drafter's confidence in each token of the last draft."""
        return self._confidence

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        if num_draft_tokens != self._num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens: expected {self._num_draft_tokens}, as at construction, "
                f"found {num_draft_tokens}"
            )
        self._length = 0
        self._source = 0
        self._confidence = []
        self._drafter.add(0, prediction=list(prediction), prompt_len=len(prompt))
        self._append(prompt)
        # Drafting in the prefill step: nothing is sampled yet, but drafts are wanted.
        self._num_sampled[0] = 1

    def propose(self) -> list[int]:
        draft = self._drafter.propose(self._token_ids, self._total_len, self._slots, self._num_sampled)
        length = int(draft.length[0])
        self._source = int(draft.source[0])
        self._confidence = draft.confidence[0, :length].tolist()
        tokens: list[int] = draft.token_ids[0, :length].tolist()
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        self._num_sampled[0] = len(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._row):
            raise ValueError(
                f"tokens: expected at most {len(self._row)} in all, as at construction, found {end}"
            )
        self._row[self._length : end] = np.asarray(tokens, dtype=np.int32)
        self._length = end
        self._total_len[0] = end


class _Sizes(NamedTuple):
    max_context_len: int
    max_prediction_len: int
    vocab_size: int


def sizes_for(records: Sequence[Record], recipes: gpu_align.Recipes | None = None) -> _Sizes:
    """The sizes of a `Drafter` that can hold any one of `records`, and draft all of `recipes`."""
    texts = [tokens for r in records for tokens in (r.prompt, r.prediction, r.output)]
    # A draft ends before an id that is out of the vocabulary: with recipes that the records use no token of, what
    # is drafted for one record would depend on the others.
    if recipes is not None and len(recipes):
        texts.append([int(recipes.token_ids.max())])
    return _Sizes(
        max_context_len=max((len(r.prompt) + len(r.output) for r in records), default=1),
        max_prediction_len=max((len(r.prediction) for r in records), default=0) or 1,
        vocab_size=max((max(tokens) for tokens in texts if tokens), default=0) + 1,
    )


def replay_batched(
    records: Sequence[Record],
    num_draft_tokens: int,
    config: gpu_align.DrafterConfig | None = None,
    draft_in_prefill: bool = False,
    name: str = "gpu_align",
    batch_size: int = 64,
    recipes: gpu_align.Recipes | None = None,
    memory: bool = False,
    related: Sequence[bool] = (),
) -> PolicyResult:
    """What `simulate` finds for a `DrafterPolicy`, with up to `batch_size` records drafted for in one call.

    The counts are the same, as a draft depends on nothing outside its own request; it takes less time, because a
    call's fixed costs are shared. A step's time is its share of the call.

    Args:
        records: what to replay.
        num_draft_tokens: K, at least 1.
        config: the drafter's settings.
        draft_in_prefill: let the prefill step verify drafts.
        name: the name in reports.
        batch_size: slots of the drafter.
        recipes: the drafter's.
        memory: take the records' predictions for texts of earlier answers.
        related: of which records these are answers to requests like it; none if empty.
    """
    sizes = sizes_for(records, recipes)
    drafter = gpu_align.Drafter(
        max_slots=batch_size,
        **sizes._asdict(),
        num_draft_tokens=num_draft_tokens,
        device="cpu",
        config=config,
        recipes=recipes,
    )
    token_ids = torch.zeros((batch_size, sizes.max_context_len), dtype=torch.int32)
    total_len = torch.zeros(batch_size, dtype=torch.int32)
    rows, lengths = token_ids.numpy(), total_len.numpy()
    results: list[PairResult | None] = [None] * len(records)
    # Longest first: the last calls then still have a full batch.
    waiting = sorted(range(len(records)), key=lambda i: len(records[i].output))
    running: dict[int, tuple[int, Generator[list[int], Drafted, PairResult]]] = {}
    free = list(range(batch_size))

    def append(slot: int, tokens: Sequence[int]) -> None:
        rows[slot, lengths[slot] : lengths[slot] + len(tokens)] = tokens
        lengths[slot] += len(tokens)

    def advance(slot: int, drafted: Drafted | None) -> None:
        index, steps = running[slot]
        try:
            append(slot, next(steps) if drafted is None else steps.send(drafted))
        except StopIteration as finished:
            results[index] = finished.value
            del running[slot]
            free.append(slot)

    while waiting or running:
        while waiting and free:
            slot, index = free.pop(), waiting.pop()
            record = records[index]
            is_related = bool(related) and related[index]
            drafter.add(slot, record.prediction, len(record.prompt), memory=memory, related=is_related)
            lengths[slot] = 0
            append(slot, record.prompt)
            running[slot] = index, verification_steps(record, num_draft_tokens, draft_in_prefill, name)
            advance(slot, None)
        if not running:
            continue
        slots = sorted(running)
        began = time.perf_counter_ns()
        draft = drafter.propose(
            token_ids, total_len, torch.tensor(slots), torch.ones(len(slots), dtype=torch.int32)
        )
        drafted = draft.length.tolist(), draft.source.tolist()
        ns = (time.perf_counter_ns() - began) // len(slots)
        tokens, confidence = draft.token_ids.numpy(), draft.confidence.numpy()
        for b, (slot, length, source) in enumerate(zip(slots, *drafted, strict=True)):
            advance(slot, Drafted(tokens[b, :length].tolist(), source, confidence[b, :length].tolist(), ns))
    return PolicyResult(name, [result for result in results if result is not None])


class PredictorPolicy(Policy):
    """Replays a predictor. Its input tokens are the prompt, then the prediction; its state begins with the prompt.

    An error of the predictor is raised: a figure without its drafts would mislead.

    Args:
        predictor: what drafts; it is reset for every record.
        name: in reports.
    """

    def __init__(self, predictor: TokenPredictor, name: str) -> None:
        self.name = name
        self._predictor = predictor
        self._loop: PredictorLoop | None = None

    def start(self, prompt: Sequence[int], prediction: Sequence[int], num_draft_tokens: int) -> None:
        if self._loop is not None:
            self._loop.stop()
        self._loop = PredictorLoop(
            self._predictor, num_draft_tokens=num_draft_tokens, strict=True, timeout=None
        )
        self._loop.start(prompt, prediction)

    def propose(self) -> list[int]:
        return self._started().draft()

    def extend(self, tokens: Sequence[int]) -> None:
        self._started().push(tokens)

    def _started(self) -> PredictorLoop:
        if self._loop is None:
            raise RuntimeError(f"policy {self.name!r}: start() must be called before propose() and extend()")
        return self._loop


def is_import_path(name: str) -> bool:
    """Whether it names a class of somebody's module and not a policy of the library."""
    return ":" in name


def import_policy(path: str) -> Policy:
    """The policy at ``module:name`` or ``module:name?argument=value&...``.

    What has this name, a class or a function, is called with the arguments and returns a `Policy` or a
    `TokenPredictor`. A value is a Python literal where it reads as one, else text:
    ``?max_tokens=8&model=org/name``.

    Raises:
        ValueError: no such module or name, arguments that it does not take, or another result.
    """
    target, _, query = path.partition("?")
    module_name, _, name = target.partition(":")
    try:
        made: Any = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"policy {path!r}: cannot import {module_name!r}: {error}") from error
    for part in name.split("."):
        made = getattr(made, part, None)
    if not callable(made):
        raise ValueError(f"policy {path!r}: expected a class or a function in {module_name!r}")
    try:
        arguments = {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        policy = made(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {path!r}: {error}") from error
    if isinstance(policy, TokenPredictor):
        return PredictorPolicy(policy, path)
    if isinstance(policy, Policy):
        policy.name = path
        return policy
    raise ValueError(f"policy {path!r}: expected a TokenPredictor or a Policy, found {type(policy).__name__}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


#: This library's drafter.
OURS = "gpu_align"
#: Fields of `DrafterConfig` along the trade-off, from few rejected drafts to few steps, beside the default. They
#: were chosen on `kinds-tune` of the corpus.
SWEEP: tuple[dict[str, Any], ...] = (
    {"length_factor": 0.5, "min_survival": 0.99, "min_survival_recipe": 0.99},
    {"length_factor": 0.5, "min_survival": 0.98, "min_survival_recipe": 0.98},
    {"length_factor": 0.5, "min_survival": 0.97, "min_survival_recipe": 0.97},
    {"length_factor": 0.75, "min_survival": 0.95, "min_survival_recipe": 0.95},
    {"length_factor": 0.75, "min_survival": 0.65, "min_survival_recipe": 0.65},
    {"length_factor": 0.5, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 0.75, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 1, "min_survival": 0.5, "min_survival_recipe": 0.5},
    {"length_factor": 1.5, "min_survival": 0.4, "min_survival_recipe": 0.4},
    {"length_factor": 1, "min_survival": 0.3},
    {"length_factor": 1.5, "min_survival": 0.3},
    {"length_factor": 2, "min_survival": 0.2},
    {"length_factor": 3, "min_survival": 0.1},
    {"length_factor": 6, "min_survival": 0.08},
    {"length_factor": 12, "min_survival": 0.05},
    {"length_factor": 12, "min_survival": 0.02},
    {"length_factor": 64, "min_survival": 0.02, "min_survival_lost": 0.2},
    {"length_factor": 16, "min_survival": 0, "min_survival_lost": 0.05},
)


def setting_name(setting: Mapping[str, Any], pack: str = SHIPPED_PACK) -> str:
    """Our drafter's name in reports: ``gpu_align``, then its settings and its recipes where not the default."""
    recipes = {} if pack == SHIPPED_PACK else {"recipes": pack}
    return " ".join([OURS, *(f"{name}={value}" for name, value in {**setting, **recipes}.items())])


def policy_names() -> list[str]:
    """Every policy: ours, then those of `gpu_align.policies` in their order."""
    return [OURS, *POLICIES, *RECIPE_POLICIES, *OPTIONAL_POLICIES]


def runnable_policy_names(with_recipes: bool = False) -> list[str]:
    """Those of `policy_names` whose packages are installed; those that draft from recipes only `with_recipes`."""
    optional = OPTIONAL_POLICIES if suffix_decoding_available() else ()
    return [OURS, *POLICIES, *optional, *(RECIPE_POLICIES if with_recipes else ())]


def make_policies(
    names: Sequence[str],
    records: Sequence[Record],
    num_draft_tokens: int,
    settings: Sequence[Mapping[str, Any]] = ({},),
    recipes: str = SHIPPED_PACK,
) -> list[Policy]:
    """One policy for each of `names`, large enough for `records`; ours once for each of `settings`.

    Each setting holds fields of `DrafterConfig`, like those of `SWEEP`; an empty one is the default.

    Where all records name the same tokenizer, ours drafts from recipes, too, and ``static_text``, which works on
    lines, gets the tokens that end a line. Otherwise ours has no recipes, and its name says so, ``static_text``
    guesses, and ``recipe_pack``, which drafts from recipes alone, cannot run.

    Args:
        names: each one of `policy_names`, or ``module:name?argument=value`` of a `TokenPredictor` or `Policy`.
        records: what they are to draft for.
        num_draft_tokens: K, at least 1.
        settings: of our drafter.
        recipes: the file of a `RecipePack`, ``"base"``: the pack that comes with the library, or ``"off"``: none.

    Raises:
        ValueError: a name is not one of these, nothing can be made of ``module:name``, a policy needs recipes and
            there are none, or the file is not a pack.
        OSError: the pack cannot be read.
        MissingExtraError: a policy's package is not installed.
    """
    factories = {**POLICIES, **OPTIONAL_POLICIES}
    policies: list[Policy] = []
    for name in names:
        if name == OURS:
            known = recipes_for(records, recipes)
            pack = NO_PACK if known is None else recipes
            for setting in settings:
                named = config_of(setting), setting_name(setting, pack)
                policies.append(DrafterPolicy.for_records(records, num_draft_tokens, *named, known))
        elif name == "static_text":
            policies.append(StaticText(ends_line=_ends_line(records)))
        elif name in RECIPE_POLICIES:
            known = recipes_for(records, recipes)
            if known is None:
                off = recipes == NO_PACK
                why = "they are off" if off else "the records do not all name the same tokenizer"
                raise ValueError(f"policy {name!r}: drafts from recipes, and there are none: {why}")
            policies.append(RECIPE_POLICIES[name](known))
        elif name in factories:
            policies.append(factories[name]())
        elif is_import_path(name):
            policies.append(import_policy(name))
        else:
            raise ValueError(f"policy: expected one of {', '.join(policy_names())}, found {name!r}")
    return policies


def config_of(setting: Mapping[str, Any]) -> DrafterConfig:
    """The `DrafterConfig` with these fields and the defaults of the others.

    Raises:
        ValueError: a value outside its domain.
    """
    return DrafterConfig(**setting)


def _ends_line(records: Sequence[Record]) -> Callable[[int], bool] | None:
    """Whether a token ends a line, if one tokenizer holds for all `records`, else None."""
    name = tokenizer_of(records)
    if name is None:
        return None
    ids = {token for record in records for text in (record.prediction, record.output) for token in text}
    return line_ending_ids(load_tokenizer(name), ids).__contains__
