"""Recipes in a worker: made with the model's tokenizer, or not at all. (Drafts from them: tests/vllm.)"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_align import RecipePack, Recipes
from gpu_align.recipes import Recipe
from gpu_align.tools.recipes.learn import learn, observe, words_of
from tests.vllm_integration.fakes import config
from vllm_integration.config.settings import Settings
from vllm_integration.worker import startup as recipes
from vllm_integration.worker.startup import in_tokens, load_recipes

TEXT = "def width(self): return self.width\n" * 4


class WordTokenizer:
    """Every text that it is asked for first is a token of its own, and each of its words is one."""

    unk_token_id: int | None = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        start = [0] if add_special_tokens else []
        return start + [self.ids.setdefault(word, len(self.ids) + 1) for word in words_of(text)]

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: list[int]) -> str:
        words = {number: word for word, number in self.ids.items()}
        return "".join(words[number] for number in ids)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json.gz"
    learn([("texts", TEXT)]).save(path)
    return path


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> WordTokenizer:
    """What vLLM gives to those who ask for the model's tokenizer."""
    given = WordTokenizer()
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda _: given)
    monkeypatch.setattr(recipes, "install", lambda group: "")
    return given


def configuration(*, ranks: int = 1, rank: int = 0, context_ranks: int = 1, **model: Any) -> Any:
    made = config(rank=rank, tp=ranks, vocab_size=1000)
    made.parallel_config.prefill_context_parallel_size = context_ranks
    vars(made.model_config).update({"skip_tokenizer_init": False, **model})
    return made


def the_warning(lines: list[str]) -> str:
    [text] = lines
    assert text.startswith("gpu_align drafts without recipes (GPU_ALIGN_RECIPES=")
    return text


def test_a_pack_becomes_recipes_and_one_line_says_so(
    pack: Path, tokenizer: WordTokenizer, info_log: list[str]
) -> None:
    made = load_recipes(Settings(recipes=str(pack)), configuration())
    assert made is not None
    assert len(made) > 3
    assert 0 not in made.context  # no special tokens
    after_def = made.context[:, 0] == tokenizer.ids["def"]
    assert tokenizer.ids[" width"] in made.token_ids[after_def, 0]
    [text] = info_log
    assert f"{len(made)} recipes (GPU_ALIGN_RECIPES={pack}), made in 0." in text


def arrays_of(recipes: Recipes) -> dict[str, Any]:
    return {name: value for name, value in vars(recipes).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (configuration(skip_tokenizer_init=True), "the engine has no tokenizer"),
        (configuration(context_ranks=2), "not with prefill context parallelism"),
        (configuration(get_vocab_size=lambda: 1), "does not know the words"),
        (configuration(get_vocab_size=lambda: {}["vocabulary"]), "KeyError: 'vocabulary'"),
    ],
)
def test_an_engine_without_what_is_needed_says_so(
    pack: Path, tokenizer: WordTokenizer, info_log: list[str], plugin_log: list[str], given: Any, reason: str
) -> None:
    assert load_recipes(Settings(recipes=str(pack)), given) is None
    assert reason in the_warning(info_log)
    assert plugin_log == info_log


def test_tokens_that_the_model_or_the_tokenizer_does_not_know_are_in_no_recipe() -> None:
    pairs = [(" a", " b"), (" c", " d"), (" e", " f"), (" g", " h")]
    told = [Recipe((before,), after, 9, 9) for before, after in pairs]
    pack = RecipePack({word: 9 for pair in pairs for word in pair}, told)
    tokenizer = WordTokenizer()
    ids = {word: tokenizer.encode(word, add_special_tokens=False)[0] for pair in pairs for word in pair}

    def kept(vocab_size: int) -> list[tuple[int, int]]:
        made = in_tokens(pack, tokenizer, vocab_size)
        return [
            (int(before[0]), int(after[0]))
            for before, after in zip(made.context, made.token_ids, strict=True)
        ]

    whole = [(ids[before], ids[after]) for before, after in pairs]
    assert kept(1000) == kept(ids[" h"] + 1) == whole
    assert kept(ids[" h"]) == whole[:3]
    tokenizer.unk_token_id = ids[" c"]
    assert kept(1000) == [whole[0], *whole[2:]]
    tokenizer.unk_token_id = ids[" b"]
    assert kept(ids[" g"]) == whole[1:3]


def of_another_tokenizer(path: Path) -> None:
    """A pack that holds ids of its tokenizer."""
    tokenizer = WordTokenizer()
    tokenizer.encode("shifts every id")
    records = [[f"name = {name}{k};\nsize = {k};\n" for k in range(3)] for name in ("ab", "cd", "ef", "gh")]
    how = recipes.encoder_of(tokenizer), recipes.token_texts_of(tokenizer, 1000)
    observe([("", "p", each) for each in records], *how).save(path)


#: Packs that cannot be used; what else may stand in a file is a test of packs.
BAD: dict[str, Callable[[Path], object]] = {
    "tampered": lambda path: path.write_bytes(path.read_bytes()[:-20] + bytes(20)),
    "of another tokenizer": of_another_tokenizer,
    "without recipes": lambda path: RecipePack({}, []).save(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", [*BAD, "twice"])
def test_a_bad_pack_costs_its_recipes_and_one_warning(
    pack: Path, tokenizer: WordTokenizer, plugin_log: list[str], kind: str
) -> None:
    bad = pack if kind == "twice" else Path(shutil.copy(pack, pack.with_name("bad.json.gz")))
    BAD.get(kind, str)(bad)
    made = load_recipes(Settings(recipes=f"{pack},{bad}"), configuration())
    alone = load_recipes(Settings(recipes=str(pack)), configuration())
    assert made is not None
    assert alone is not None
    assert len(made) == len(alone) > 0
    warning = the_warning(plugin_log)
    assert f"(GPU_ALIGN_RECIPES={bad}): " in warning
    assert len(warning) < 1000
    if kind != "twice":
        plugin_log.clear()
        assert load_recipes(Settings(recipes=str(bad)), configuration()) is None
        the_warning(plugin_log)


def test_the_text_of_a_token_is_that_inside_a_text() -> None:
    class Stripping(WordTokenizer):
        """Decodes as SentencePiece does: a text begins with no space."""

        def decode(self, ids: list[int]) -> str:
            return super().decode(ids).removeprefix(" ")

    tokenizer = Stripping()
    ids = tokenizer.encode(" a b c", add_special_tokens=False)
    texts = recipes.token_texts_of(tokenizer, max(ids) + 1)
    assert texts(ids) == [" a", " b", " c"]
    assert texts([0, *ids, 500]) == ["", " a", " b", " c"]


class Group:
    """As much of a `GroupCoordinator` as is used; what the first rank sends arrives read-only."""

    sent: Any = None

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            Group.sent = obj
            if obj is not None:
                for array in arrays_of(obj).values():
                    array.flags.writeable = False
        return Group.sent


@pytest.mark.parametrize("there", [True, False])
def test_all_ranks_get_what_the_first_one_made(
    pack: Path, tokenizer: WordTokenizer, info_log: list[str], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Also where only the others could have made some: ranks that draft differently verify different tokens."""
    path = pack if there else pack.with_name("gone")
    made: list[Recipes | None] = []
    for rank in range(3):
        monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda rank=rank: Group(rank))
        made.append(load_recipes(Settings(recipes=str(path)), configuration(ranks=3, rank=rank)))
        path = pack if rank else pack.with_name("gone")
    assert len(info_log) == 1
    if not there:
        assert made == [None] * 3
        return
    for other in made:
        assert other is not None
        assert other.names == made[0].names
        for name, array in arrays_of(other).items():
            assert np.array_equal(array, arrays_of(made[0])[name])
            assert array.flags.writeable or other is made[0]
