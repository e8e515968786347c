"""Recipe packs: what usually follows what, learned from texts or observed in what a model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..ops.recipe_lookup import Recipes
from . import files
from .chains import Chains, Observed
from .files import MAX_BYTES, NUM_BINS, Content, PackError
from .learn import learn
from .merge import merge
from .observe import Group, observe
from .report import Output, Report, report
from .tokenize import Encode, TokenTexts, all_classes, fingerprint, tokenize
from .words import Recipe

if TYPE_CHECKING:
    from .misses import Misses

#: The pack that comes with the library.
SHIPPED = Path(__file__).with_name("base.json.gz")

__all__ = ["MAX_BYTES", "NUM_BINS", "SHIPPED", "PackError", "RecipePack"]


@dataclass(frozen=True, repr=False)
class RecipePack:
    """What usually follows what: in words, for any tokenizer, and in the tokens of one.

    Attributes:
        words: how often each word was seen.
        recipes: by context, shorter ones first.
        calibration: [NUM_BINS], added to a probability in the middle of a bin; interpolated between middles.
        made_by: the command that made it.
        task: what it was observed in.
        tokenizer: the `fingerprint` of the tokenizer whose ids it holds; "" where it holds none.
        observed: by falling frequency.
        kept: the ids that stay themselves in shapes, ascending: the task's keywords and punctuation.
    """

    words: Mapping[str, int]
    recipes: Sequence[Recipe]
    calibration: Sequence[float] = (0.0,) * NUM_BINS
    made_by: str = ""
    task: str = ""
    tokenizer: str = ""
    observed: Sequence[Observed] = ()
    kept: Sequence[int] = ()

    def __repr__(self) -> str:
        """One line: how many words, recipes and entries."""
        counts = f"num_words={len(self.words)}, num_recipes={len(self.recipes)}"
        return f"RecipePack({counts}{f', num_observed={len(self.observed)}' if self.observed else ''})"

    @classmethod
    def learn(cls, texts: Iterable[tuple[str, str]], made_by: str = "") -> RecipePack:
        """Learn from pairs of a source, a project for example, and a text of it.

        Recipes that only one source writes are left out, unless there is only one source. The order of the texts
        does not matter.
        """
        return cls(*learn(texts), made_by=made_by)

    @classmethod
    def observe(
        cls,
        groups: Iterable[Group],
        encode: Encode,
        token_texts: TokenTexts,
        *,
        agree: float = 1.0,
        task: str = "",
        made_by: str = "",
        progress: Callable[[str, int], None] | None = None,
    ) -> RecipePack:
        """Learn from what a model answers: k samples for each prompt of a task.

        ::

            for each group: align its samples; a token is determined where at least agree · k of them have it
            kept = tokens of which half of the occurrences are determined, numbers apart
            an entry = a literal prefix or a shape of 1 to 8 items, and the token that follows
            it is kept where the samples of two groups, and of 1 % of all groups (of the only group), agree on
            the token behind it, and where the token follows at least 0.95 of all occurrences of the prefix

        Args:
            groups: ``(task, prompt, samples)`` each. Of one sample nothing is determined.
            encode: gives the token ids of each text, without special tokens.
            token_texts: the text of each token id.
            agree: the share of the samples that must agree; above 0, at most 1.
            task: of the pack; if empty, the groups' tasks, joined by ``+``.
            made_by: the command.
            progress: called as ``progress(task, 1)`` after each group.

        Raises:
            ValueError: `agree` outside its domain.
        """
        if not 0 < agree <= 1:
            raise ValueError(f"agree: expected 0 < share <= 1, found {agree}")
        found = observe(groups, encode, token_texts, agree, progress)
        task = task or "+".join(dict.fromkeys(name for name in found.tasks if name))
        return cls(
            {},
            [],
            (0.0,) * NUM_BINS,
            made_by,
            task,
            fingerprint(encode),
            tuple(found.observed),
            tuple(found.kept),
        )

    @classmethod
    def load(cls, path: Path | str | None = None) -> RecipePack:
        """Read a pack, plain or gzipped; None stands for the one that comes with the library.

        A file is trusted with nothing: at most `MAX_BYTES` of it and of its text are read, whatever it says, and
        a changed byte is refused.

        Raises:
            TypeError: no path.
            PackError: the file is not a pack; the message says why.
            OSError: the file cannot be read.
        """
        if path is not None and not isinstance(path, (str, Path)):
            raise TypeError(f"path: expected a str or Path, found {type(path).__name__}")
        return cls(*files.read_pack(SHIPPED if path is None else Path(path)))

    def save(self, path: Path | str) -> None:
        """Write the pack, gzipped if the name ends in ``.gz``; the same pack is the same bytes."""
        files.write(Path(path), files.pack_data(self.content))

    @property
    def content(self) -> Content:
        """All fields."""
        return Content(*(getattr(self, field.name) for field in fields(self)))

    @property
    def content_hash(self) -> str:
        """``"sha256:…"`` over all that its file holds besides."""
        return str(files.pack_data(self.content)["content_hash"])

    def calibrated(self, calibration: Sequence[float]) -> RecipePack:
        """The same pack with another calibration."""
        return replace(self, calibration=tuple(calibration))

    def shapes_only(self, min_groups: int = 2) -> RecipePack:
        """A pack to share: shapes alone, and only with tokens that `min_groups` groups agreed on.

        Words, recipes and literal prefixes, which are text, are left out, and so are tokens that stay themselves
        in no shape that is left.
        """
        left = tuple(e for e in self.observed if e.is_shape and (e.groups >= min_groups or e.token < 0))
        named = {item for entry in left for item in entry.context}
        return replace(
            self,
            words={},
            recipes=[],
            observed=left,
            kept=tuple(token for token in self.kept if token in named),
        )

    def merge(self, *others: RecipePack | Misses) -> RecipePack:
        """One pack of several, and of what was counted where their tokens were refuted; see `recipes/README.md`.

        Raises:
            PackError: token ids of different tokenizers.
        """
        return RecipePack(*merge([self.content, *(other.content for other in others)]))

    def report(
        self,
        outputs: Iterable[Output],
        encode: Encode,
        token_texts: TokenTexts,
        num_draft_tokens: int = 16,
        *,
        misses: Misses | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> Report:
        """Replay outputs with this pack alone, and with a drafter that has the context as well.

        Args:
            outputs: ``(task, prompt, output)`` each.
            encode, token_texts: as in `tokenize`.
            num_draft_tokens: K.
            misses: counts what was refuted and accepted with the pack alone.
            progress: called as ``progress(task, 1)`` after each output.
        """
        recipes = self.tokenize(encode, token_texts)
        return report(recipes, outputs, encode, num_draft_tokens, misses, progress)

    def tokenize(self, encode: Encode, token_texts: TokenTexts | None = None) -> Recipes:
        """The pack in the tokens of one model, as `gpu_align.Drafter` takes it.

        Args:
            encode: gives the token ids of each text, without special tokens.
            token_texts: the text of each token id; needed where something was observed. It is asked for all ids
                from 0 on until it raises an error or has no more texts.

        A recipe is left out where the tokenizer joins the end of its context and its word into one token.

        Raises:
            PackError: the pack holds ids of another tokenizer.
            TypeError: something was observed and there is no `token_texts`.
        """
        words = tokenize(self.words, self.recipes, self.calibration, encode)
        if not self.observed:
            return words
        if (found := fingerprint(encode)) != self.tokenizer:
            raise PackError(
                f"tokenizer: expected {self.tokenizer}, as the pack was observed with, found {found}"
            )
        if token_texts is None:
            raise TypeError("token_texts: expected a function, as the pack holds shapes, found None")
        shape_of = all_classes(token_texts)
        kept = np.array([token for token in self.kept if token < len(shape_of)], dtype=np.int64)
        shape_of[kept] = kept
        literal, shapes = self._runs(shape_of)
        return _joined(words, Recipes.from_lists(literal), Recipes.from_lists(shapes, shape_of=shape_of))

    def _runs(self, shape_of: npt.NDArray[np.int32]) -> tuple[list[Row], list[Row]]:
        """Literal rows and those of shapes: each entry with the run that begins with its token."""
        chains = Chains(self.observed, dict(enumerate(shape_of.tolist())))
        rows: tuple[list[Row], list[Row]] = [], []
        for entry in self.observed:
            run = chains.run(entry.is_shape, entry.context) if entry.token >= 0 else ([], [])
            rows[entry.is_shape].append((entry.context, *run))
        return rows


#: A context in reading order, its continuation, and how likely each part of that is.
Row = tuple[Sequence[int], Sequence[int], Sequence[float]]


def _joined(words: Recipes, literal: Recipes, shapes: Recipes) -> Recipes:
    """All in one pack; of two literal contexts that are equal the observed one."""
    known = {row.tobytes() for row in literal.context}
    words = words.select(np.array([row.tobytes() not in known for row in words.context], dtype=np.bool_))
    each = literal, words, shapes
    context, token_ids, survival, is_shape = (
        np.concatenate([getattr(part, name) for part in each])
        for name in ("context", "token_ids", "survival", "is_shape")
    )
    return Recipes(context, token_ids, survival, is_shape, shape_of=shapes.shape_of, indents=words.indents)
