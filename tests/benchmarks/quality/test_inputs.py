"""What is made ready: the corpora that are missing, and no more after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.quality import runs


@pytest.mark.parametrize(("status", "sets"), [(0, ["tune", "kinds"]), (1, ["tune"])])
def test_what_is_missing_is_made_up_to_the_first_failure(
    status: int, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(runs.corpus, "main", lambda argv: made.append(argv) or status)
    paths = {name: tmp_path / f"{name}.gz" for name in ("test", "tune", "kinds")}
    paths["test"].write_bytes(b"")
    assert runs.make_corpora(paths) == status
    assert made == [[str(paths[name]), "--set", name] for name in sets]


def test_without_the_peer_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(runs.build_suffix_peer, "build", fails)
    monkeypatch.setattr(runs.corpus, "main", lambda argv: pytest.fail("a corpus was made"))
    assert runs.make_ready({"test": tmp_path / "a"}) == 1
    assert "no compiler" in capsys.readouterr().err
