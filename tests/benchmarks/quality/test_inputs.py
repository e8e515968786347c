"""What is made ready: the corpora that are missing, and no more after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rapidfuzz")

from benchmarks.quality import inputs


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(inputs.corpus, "main", lambda argv: made.append(argv) or 0)
    there, missing = tmp_path / "test.gz", tmp_path / "tune.gz"
    there.write_bytes(b"")
    assert inputs.make_corpora({"test": there, "tune": missing}) == 0
    assert made == [[str(missing), "--set", "tune"]]


def test_the_first_failure_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(inputs.corpus, "main", lambda argv: made.append(argv) or 1)
    assert inputs.make_corpora({"test": tmp_path / "a", "tune": tmp_path / "b"}) == 1
    assert len(made) == 1


def test_without_the_peer_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inputs.build_suffix_peer, "build", fails)
    monkeypatch.setattr(inputs.corpus, "main", lambda argv: pytest.fail("a corpus was made"))
    assert inputs.make_ready({"test": tmp_path / "a"}) == 1
    assert "no compiler" in capsys.readouterr().err
