"""`gpu-align tune --pack`: recipes from one's own requests, what they are learned from and worth."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mistral_common")
from typer.testing import CliRunner

from gpu_align import DrafterConfig, RecipePack
from gpu_align.ops.choose.survival import read_table
from gpu_align.recipes import learn
from gpu_align.recipes.pack import NUM_BINS
from gpu_align.recipes.registry import resolve_packs
from gpu_align.simulate import Record, load_tokenizer
from gpu_align.tools.cli import app
from gpu_align.tools.simulate.policies import tokenized_pack
from gpu_align.tools.tune.tuning import OwnPack, Tokens, key_of, split
from tests.gpu_align.tune.test_tune import write_logs

#: What the house writes behind each name; no shipped pack knows it.
PHRASE = "\\housemark{checked by the committee}"
LETTERS = "abcdefghij"


def name_of(number: int) -> str:
    """A word of its own for each request."""
    return "only" + "".join(LETTERS[int(digit)] for digit in f"{number:03}")


def texts_of(count: int = 10) -> list[dict[str, str]]:
    """Outputs add the phrase behind items that the predictions have without, and a word that requests share."""
    rows = []
    for number in range(count):
        items = [f"\\item {name_of(number)} {LETTERS[(number + i) % 10]}{LETTERS[i]}" for i in range(6)]
        rows.append({
            "id": f"r{number}",
            "prediction_text": "\n".join(items) + "\n",
            "output_text": "\n".join(f"{item} {PHRASE}" for item in items) + "\n",
        })  # fmt: skip
    held = {record.id for record in split(encoded(rows))[1]}
    for row in rows:
        row["output_text"] += 4 * (" zebrafish" if row["id"] in held else " quetzal")
    return rows


def encoded(rows: list[dict[str, str]]) -> list[Record]:
    encode = load_tokenizer("tekken").encode
    return [
        Record(row["id"], [], encode(row["prediction_text"]), encode(row["output_text"]), "tekken")
        for row in rows
    ]


def records_of(count: int = 10) -> list[Record]:
    return encoded(texts_of(count))


@pytest.fixture(scope="module", autouse=True)
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small pack with the calibration of the shipped one, which takes seconds to read and to tokenize."""
    path = tmp_path_factory.mktemp("shipped") / "base.json.gz"
    learn([("one", "alpha beta gamma\n" * 20)]).calibrated(RecipePack.load().calibration).save(path)
    tokenized_pack.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_align.recipes.pack.SHIPPED", path)
        yield
    tokenized_pack.cache_clear()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with ``t.json`` and ``p.json.gz``, and what the command said."""
    folder = tmp_path_factory.mktemp("own")
    return folder, run(folder, [str(pairs_in(folder, texts_of())), "--tokenizer", "tekken"])


def pairs_in(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"id": i, **row}) + "\n" for i, row in enumerate(rows)))
    return path


def run(folder: Path, more: list[str], code: int = 0) -> str:
    out = ["-o", str(folder / "t.json"), "--pack", str(folder / "p.json.gz")]
    done = CliRunner().invoke(app, ["tune", *more, *out])
    assert done.exit_code == code, done.output
    return done.output


def test_the_report_has_both_and_the_gain_of_both(written: tuple[Path, str]) -> None:
    folder, said = written
    for row in ("shipped table, shipped pack", "new table, shipped pack", "new table, own pack"):
        assert row in said
    gain = float(said.split("at equal rejections: ")[1].split("%")[0])
    assert gain > 20
    table, pack = folder / "t.json", folder / "p.json.gz"
    use = f"GPU_ALIGN_SURVIVAL_TABLE={table} GPU_ALIGN_RECIPES={pack},base"
    assert said.replace("\n", "").endswith(use)


def test_a_server_and_a_drafter_take_what_is_written(written: tuple[Path, str]) -> None:
    folder, _ = written
    assert list(resolve_packs(f"{folder / 'p.json.gz'},base")) == ["p", "base"]
    config = DrafterConfig.tuned(folder / "t.json")
    settings = read_table(folder / "t.json")["settings"]
    assert {name: getattr(config, name) for name in settings} == settings


def test_a_word_is_in_the_pack_where_two_requests_that_are_learned_from_share_it(
    written: tuple[Path, str],
) -> None:
    learned, held = split(records_of())
    pack = gzip.decompress((written[0] / "p.json.gz").read_bytes()).decode()
    assert len(learned) > len(held) > 1
    assert "committee" in pack
    assert "quetzal" in pack
    assert "zebrafish" not in pack
    for record in (*held, *learned):
        assert name_of(int(record.id[1:])) not in pack
    assert "committee" not in (written[0] / "t.json").read_text()


def test_a_part_is_replayed_with_what_the_others_teach() -> None:
    own = OwnPack(records_of(8), Tokens(load_tokenizer("tekken")))
    parts = own.parts()
    assert sorted(r.id for part in parts for r in part.records) == [f"r{i}" for i in range(8)]
    keys = [{key_of(record) for record in part.records} for part in parts]
    assert all(not a & b for i, a in enumerate(keys) for b in keys[:i])
    alone = OwnPack(records_of(2), Tokens(load_tokenizer("tekken"))).parts()
    base = len(own.shipped)
    # Of two requests each part knows the other one, where all is written by one source.
    assert [len(part.records) for part in alone] == [1, 1]
    assert all(len(part.recipes or ()) > base for part in alone)


def test_the_same_requests_give_the_same_bytes(tmp_path: Path, written: tuple[Path, str]) -> None:
    """In another order, and half of them as step logs."""
    pytest.importorskip("yaml")
    write_logs(tmp_path / "logs", records_of()[::2])
    refused = run(tmp_path, [str(tmp_path / "logs")], code=2)
    assert "--pack: expected --tokenizer, as request" in refused
    assert not (tmp_path / "t.json").exists()
    pairs = pairs_in(tmp_path, texts_of()[::-2])
    run(tmp_path, [str(pairs), str(tmp_path / "logs"), "--tokenizer", "tekken"])
    for name in ("t.json", "p.json.gz"):
        assert (tmp_path / name).read_bytes() == (written[0] / name).read_bytes()


def test_a_calibration_follows_what_was_accepted_and_rises() -> None:
    own = OwnPack(records_of(4), Tokens(load_tokenizer("tekken")))
    shipped = RecipePack.load().calibration
    own.calibrate(np.zeros((2, NUM_BINS)))
    assert own.calibration == pytest.approx(shipped, abs=0.05)
    counted = np.zeros((2, NUM_BINS))
    counted[:, 10] = 10_000, 2_000
    own.calibrate(counted)
    assert own.calibration[10] == pytest.approx(0.2, abs=0.01)
    assert (np.diff((np.arange(NUM_BINS) + 0.5) / NUM_BINS + own.calibration) > -1e-9).all()


def test_special_tokens_are_no_text() -> None:
    tokenizer = load_tokenizer("tekken")
    tokens = Tokens(tokenizer)
    text = "<b>[x]</b> Füße <s>\n"
    assert tokens.text([1, *tokenizer.encode(text), 2]) == text


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prediction": [1, 2], "output": [3]}], [], "--pack: expected --tokenizer"),
        ([{"prediction": [1], "output": [999_999]}], ["--tokenizer", "tekken"], "which have token 999999, found"),
        ([{"prediction": [7 + 3 * n], "output": [9]} for n in range(9)], ["--tokenizer", "tekken"],
         "too little text: no two requests"),
    ],
)  # fmt: skip
def test_what_gives_no_pack_is_one_line(
    rows: list[dict[str, list[int]]], options: list[str], message: str, tmp_path: Path
) -> None:
    assert message in run(tmp_path, [str(pairs_in(tmp_path, rows)), *options], code=2)
    assert not list(tmp_path.glob("[tp].json*"))
