"""`gpu-align tune --pack`: recipes from one's own requests, what they are learned from and worth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mistral_common")
from typer.testing import CliRunner

from gpu_align import DrafterConfig, RecipePack
from gpu_align.ops.draft import read_table
from gpu_align.recipes.pack import NUM_BINS
from gpu_align.recipes.registry import resolve_packs
from gpu_align.simulate import Record, load_tokenizer
from gpu_align.tools.cli import app
from gpu_align.tools.tune.packs import OwnPack, Tokens, key_of
from gpu_align.tools.tune.tuning import split, tune

#: What the house writes behind each name; no shipped pack knows it.
PHRASE = "\\housemark{checked by the committee}"
LETTERS = "abcdefghij"


def name_of(number: int) -> str:
    """A word of its own for each request."""
    return "only" + "".join(LETTERS[int(digit)] for digit in f"{number:03}")


def texts_of(count: int = 10) -> list[dict[str, str]]:
    """Outputs add the phrase behind items that the predictions have without."""
    rows = []
    for number in range(count):
        items = [f"\\item {name_of(number)} {LETTERS[(number + i) % 10]}{LETTERS[i]}" for i in range(6)]
        rows.append({
            "id": f"r{number}",
            "prediction_text": "\n".join(items) + "\n",
            "output_text": "\n".join(f"{item} {PHRASE}" for item in items) + "\n",
        })  # fmt: skip
    return rows


def records_of(count: int = 10) -> list[Record]:
    encode = load_tokenizer("tekken").encode
    return [
        Record(row["id"], [], encode(row["prediction_text"]), encode(row["output_text"]), "tekken")
        for row in texts_of(count)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with ``t.json`` and ``p.json.gz``, and what the command said."""
    folder = tmp_path_factory.mktemp("own")
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in texts_of()))
    return folder, run(folder, [str(pairs), "--tokenizer", "tekken"])


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


def test_no_word_that_only_held_back_requests_have_is_in_the_pack(written: tuple[Path, str]) -> None:
    learned, held = split(records_of())
    pack = gzip.decompress((written[0] / "p.json.gz").read_bytes()).decode()
    assert "committee" in pack
    assert len(learned) > len(held) > 0
    for record in (*held, *learned):
        # A word of one request is in none: another one has to write it, too.
        assert name_of(int(record.id[1:])) not in pack
    table = (written[0] / "t.json").read_text()
    assert "committee" not in table


def test_words_that_two_requests_share_are_in_it_only_where_both_are_learned_from() -> None:
    records, tokens = records_of(), Tokens(load_tokenizer("tekken"))
    learned, held = split(records)
    encode = load_tokenizer("tekken").encode

    def marked(record: Record, word: str) -> Record:
        return Record(
            record.id, [], record.prediction, record.output + encode(f" {word} {word} {word} {word}")
        )

    for chosen, expected in ((held, False), (learned, True)):
        ids = {record.id for record in chosen}
        changed = [marked(r, "zebrafish") if r.id in ids else r for r in records]
        pack = tune(changed, tokens=tokens).pack
        assert pack is not None
        assert any("zebrafish" in word for word in pack.words) is expected


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
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in texts_of()[::-1]))
    run(tmp_path, [str(pairs), "--tokenizer", "tekken"])
    for name in ("t.json", "p.json.gz"):
        assert (tmp_path / name).read_bytes() == (written[0] / name).read_bytes()


def test_step_logs_teach_the_same(tmp_path: Path, written: tuple[Path, str]) -> None:
    yaml = pytest.importorskip("yaml")
    logs = tmp_path / "logs"
    logs.mkdir()
    for record in records_of():
        steps = [
            {"step": i, "position": i, "source": "none", "proposed": [], "confidence": [], "duration_us": 0,
             "verified": 0, "accepted": 0, "new": [token]} for i, token in enumerate(record.output)
        ]  # fmt: skip
        log = {
            "format": "gpu-align-steps/1", "request_id": record.id, "num_draft_tokens": 4, "prompt_tokens": 0,
            "prediction_tokens": len(record.prediction), "prediction_lines": [{"tokens": record.prediction}],
            "steps": steps,
        }  # fmt: skip
        (logs / f"{record.id}.yaml").write_text(yaml.safe_dump(log))
    refused = run(tmp_path, [str(logs)], code=2)
    assert "--pack: expected --tokenizer, as request" in refused
    assert not (tmp_path / "t.json").exists()
    run(tmp_path, [str(logs), "--tokenizer", "tekken"])
    assert (tmp_path / "p.json.gz").read_bytes() == (written[0] / "p.json.gz").read_bytes()


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
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"id": i, **row}) + "\n" for i, row in enumerate(rows)))
    assert message in run(tmp_path, [str(pairs), *options], code=2)
    assert not list(tmp_path.glob("[tp].json*"))
