"""How a prediction travels: one value under one key of `SamplingParams.extra_args`. vLLM's MessagePack makes a
dict of it, our schedulers put the type back. Its `repr` shows its size and never its content, because vLLM's crash
dump prints `SamplingParams`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_align import TextKind as TextKind
from gpu_align.texts.several import TokenIds, held_once, joined, parted

KEY = "gpu_align_prediction"
#: Keys that a client sends beside it. The front end moves them into the `Prediction`; where nothing is drafted for
#: the request, ``memory: False`` alone is left, in its place.
RECIPES_KEY, MEMORY_KEY, SWITCH_KEY = "recipes", "memory", "gpu_align"
MAX_TOKEN_ID = 2**31 - 1

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
#: Of each of several texts.
_TEXTS = (list, tuple, np.ndarray)


@dataclass(frozen=True, repr=False)
class Prediction:
    """Ids and options of a request in `extra_args`.

    token_ids: int32, little-endian; none where it is drafted for without a prediction. None: malformed.
    recipes: names of the packs whose recipes the request uses; None: of all packs.
    memory: False where the request takes no part in the memory of earlier answers, else None.
    drafts: False: nothing is drafted for it. True: also where it brings nothing. None: as the settings say.
    sharing_key: requests with equal keys may share the memory of equal predictions; None: with no other. The
        scheduler sets it.
    kind: what the ids are. The scheduler, which puts earlier answers in the place of an empty prediction, sets it.
    one_each: whether each sample of the request has one of its texts; the front end makes one request of each.

    vLLM's MessagePack encoder takes plain dataclasses (and refuses subclasses of `bytes`).
    """

    token_ids: bytes | None = b""
    recipes: tuple[str, ...] | None = None
    memory: bool | None = None
    drafts: bool | None = None
    sharing_key: bytes | None = None
    kind: TextKind = TextKind.PREDICTION
    one_each: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is predicted. What is malformed is not empty."""
        return self.token_ids == b""

    def __repr__(self) -> str:
        what = "tokens of earlier answers" if self.kind else "tokens"
        return f"Prediction({len(self.token_ids or b'') // 4} {what})"


class RequestContent(NamedTuple):
    """A `Prediction`, decoded once by a worker."""

    token_ids: TokenIds = np.zeros(0, np.int32)
    kind: TextKind = TextKind.PREDICTION
    recipes: tuple[str, ...] | None = None
    sharing_key: bytes | None = None
    end_tokens: tuple[int, ...] = ()
    temperature: float = 0.0


@dataclass(frozen=True, repr=False)
class PredictedOutputParams:
    """A prediction for the offline API.

        params = SamplingParams(extra_args=PredictedOutputParams(prediction=text).to_extra_args())
        llm.chat(messages, params)

    prediction: the text the answer is expected to resemble, or several, of which each may be: `n` of them with a
        `seed` are one for each of the `n` samples. CR LF and lone CR become LF; it is tokenised once, by the
        model's tokenizer, without special tokens.
    token_ids: or its token ids, or those of several, 0 ≤ id < vocabulary size. A request with others is served
        without a prediction; the worker, which knows the vocabulary, logs one warning.

    Exactly one of these. An empty prediction is no prediction.
    Raises `TypeError` and `ValueError` that name the argument, what was expected and what was found.
    """

    prediction: str | Sequence[str] | None = None
    token_ids: Ids | Sequence[Ids] | None = None

    def __post_init__(self) -> None:
        if (self.prediction is None) == (self.token_ids is None):
            found = "neither" if self.prediction is None else "both"
            raise ValueError(f"expected exactly one of prediction and token_ids, got {found}")
        if isinstance(self.prediction, (list, tuple)):
            for index, text in enumerate(self.prediction):
                check_text(f"prediction[{index}]", text)
        elif self.prediction is not None:
            check_text("prediction", self.prediction)
        else:
            encode_token_ids("token_ids", self.token_ids)

    def __repr__(self) -> str:
        return "PredictedOutputParams(...)"

    def to_extra_args(self) -> dict[str, Any]:
        """For `SamplingParams.extra_args`; `{}` when empty. The engine tokenises a text."""
        if self.prediction is not None:
            return {KEY: self} if any(self.prediction) else {}
        encoded = encode_token_ids("token_ids", self.token_ids)
        return {KEY: Prediction(token_ids=encoded)} if encoded else {}


def normalise_newlines(text: str) -> str:
    """CR LF and lone CR become LF: models write LF, whatever the client's platform does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(name: str, text: object) -> None:
    """Raise unless `text` is a str that UTF-8 can express (a lone surrogate is not)."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected valid Unicode, got a lone surrogate at character {error.start}"
        ) from None


def encode_token_ids(name: str, token_ids: object, *, tell: bool = True) -> bytes:
    """int32 little-endian bytes of a one-dimensional sequence of ints, 0 ≤ id < 2**31; or of several, joined with
    all that are equal.

    tell: whether an error may say which id it found; not where the message could reach a log.
    """
    if not (isinstance(token_ids, (list, tuple)) and isinstance(next(iter(token_ids), None), _TEXTS)):
        return _encode_one(name, token_ids, tell)
    texts = [_encode_one(f"{name}[{index}]", each, tell) for index, each in enumerate(token_ids)]
    try:
        ids = joined((decode_token_ids(text).tolist() for text in texts), once=False)
        return np.array(ids, dtype="<i4").tobytes()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _encode_one(name: str, token_ids: object, tell: bool) -> bytes:
    if isinstance(token_ids, np.ndarray):
        ids = token_ids
    elif not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{name}: expected a sequence of token ids, got {type(token_ids).__name__}")
    else:
        if not set(map(type, token_ids)) <= {int}:  # one pass in C: a request may bring a million ids
            for index, item in enumerate(token_ids):
                if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
                    raise TypeError(f"{name}[{index}]: expected a token id, got {type(item).__name__}")
        try:
            ids = np.array(token_ids, dtype=np.int64)
        except OverflowError:
            found = "one beyond 64 bits" if tell else "another"
            raise ValueError(f"{name}: expected 0 ≤ id < 2**31, got {found}") from None
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(f"{name}: expected one dimension of integers, got {ids.ndim}-d {ids.dtype}")
    if ids.size and not (ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID):
        found = f"{ids.min()} to {ids.max()}" if tell else "others"
        raise ValueError(f"{name}: expected 0 ≤ id < 2**31, got {found}")
    return ids.astype("<i4").tobytes()


def decode_token_ids(encoded: bytes) -> TokenIds:
    """The inverse of `encode_token_ids`: a new int32 array. Raises `ValueError` for a torn encoding."""
    if len(encoded) % 4:
        raise ValueError(f"token_ids: expected a multiple of 4 bytes, got {len(encoded)}")
    return np.frombuffer(encoded, dtype="<i4").astype(np.int32)


def for_samples(params: Any, given: Prediction) -> Prediction:
    """`given` for all samples of a request with these parameters. With a seed each sample is drawn with one of its
    own: of as many predictions it has its own, too. Else all draft from all of them, equal ones once."""
    encoded = given.token_ids or b""
    if len(encoded) % 4:
        return given
    ids, n = decode_token_ids(encoded), getattr(params, "n", 1)
    if n > 1 and params.seed is not None and len(parted(ids)) == n:
        return replace(given, one_each=True)
    return replace(given, token_ids=held_once(ids).astype("<i4").tobytes())


def of_sample(given: Prediction, index: int) -> Prediction:
    """The prediction of one sample, of those of a request with `one_each`."""
    own = parted(decode_token_ids(given.token_ids or b""))[index]
    return replace(given, token_ids=own.astype("<i4").tobytes(), one_each=False)


#: Of each field of a `Prediction` that another process may have sent, the type it has, where it is not None.
_TYPES = {"sharing_key": bytes, "memory": bool, "drafts": bool, "one_each": bool, "kind": int}


def read(value: object) -> Prediction:
    """Read a value of `KEY`: a `Prediction`, the dict it becomes between processes, or token ids of `vllm_xargs`.
    Raises `TypeError`/`ValueError` that repeat no id."""
    if isinstance(value, (Prediction, Mapping)):
        fields = dict(vars(value) if isinstance(value, Prediction) else value)
    else:
        fields = {"token_ids": value}
    known = Prediction.__dataclass_fields__
    if set(fields) - set(known):
        raise ValueError(f"prediction: expected the keys {', '.join(known)}, got others")
    for name, expected in _TYPES.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, expected):
            raise TypeError(f"prediction.{name}: expected {expected.__name__}, got {type(value).__name__}")
    recipes, token_ids = map(fields.get, ("recipes", "token_ids"))
    if recipes is not None:
        if not isinstance(recipes, (list, tuple)) or not all(isinstance(name, str) for name in recipes):
            raise TypeError("prediction.recipes: expected strings")
        fields["recipes"] = tuple(recipes)
    fields["kind"] = TextKind(fields.get("kind") or 0)
    if not isinstance(token_ids, (bytes, bytearray, memoryview)):
        token_ids = encode_token_ids("prediction", token_ids, tell=False)
    return Prediction(**{**fields, "token_ids": bytes(token_ids)})


def brought_by(sampling_params: Any) -> Prediction | None:
    """The value of a request under `KEY` since `put_back`, or None."""
    value = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
    return value if isinstance(value, Prediction) else None


def with_extra_args(sampling_params: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of `SamplingParams` whose `extra_args` have these values; None takes a key away."""
    given = sampling_params.extra_args or {}
    changed = copy.copy(sampling_params)
    kept = {name: value for name, value in given.items() if name not in changes}
    kept |= {name: value for name, value in changes.items() if value is not None}
    changed.extra_args = kept or None
    return changed


def put_back(request: Any) -> None:
    """Give a vLLM `Request` (or `NewRequestData`) its `Prediction` again, which prints as its size and carries who
    may share its memory; instead of a malformed one, one that `read` refuses."""
    value = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
    if value is None:
        return
    try:
        given = read(value)
    except (TypeError, ValueError):
        given = Prediction(token_ids=None)
    given = replace(given, sharing_key=sharing_key_of(request))
    request.sampling_params = with_extra_args(request.sampling_params, {KEY: given})


def sharing_key_of(request: Any) -> bytes:
    """The same for all requests with one `cache_salt`, and for all without one."""
    salt = getattr(request, "cache_salt", None)
    return b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
