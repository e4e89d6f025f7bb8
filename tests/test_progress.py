"""Progress as a bar, as lines for a launcher, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigunet.progress import PROGRESS_FILE, Progress


def test_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, "tiles", done=1) as progress:
        for _ in range(3):
            progress.update(loss=0.125)
    err = capsys.readouterr().err
    assert "tiles: 100%" in err
    assert "4/4" in err
    assert "loss=0.125" in err


def test_lines_for_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines"
    monkeypatch.setenv(PROGRESS_FILE, str(path))
    with Progress(1000, "train") as progress:
        for _ in range(1000):
            progress.update(loss=1.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"done": 0, "total": 1000, "text": "train"}
    assert lines[-1] == {"done": 1000, "total": 1000, "text": "train", "loss": 1.0}
    assert len(lines) < 100
    assert capsys.readouterr().err == ""


def test_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "lines"))
    with Progress(2, "train", shown=False) as progress:
        progress.update(2)
    monkeypatch.delenv(PROGRESS_FILE)
    with Progress(2, "train", shown=False) as progress:
        progress.update(2)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "lines").exists()
