"""Every notebook runs from top to bottom, quickly and without a word on stderr."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from bigunet.handover import COURSE, WORK, take_up

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them run, one after the other: each takes up what those before it handed on."""
    return tmp_path_factory.mktemp("course")


def execute(path: Path, folder: Path) -> Any:
    """The executed notebook; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


@pytest.mark.alone
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_within_a_minute_and_shows_no_warning(path: Path, folder: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert not outputs(stored), "notebooks are stored without outputs"
    taken = take_up(path.stem, folder / WORK)
    began = time.monotonic()
    notebook = execute(path, folder)
    assert time.monotonic() - began < 60
    made = outputs(notebook)
    assert made
    loud = [o for o in made if o.output_type == "error" or o.get("name") == "stderr"]
    assert not loud, loud
    text = "".join(o.get("text", "") for o in made if o.output_type == "stream")
    assert "Warning" not in text
    # It says where it started from, and what the next one takes up is its own.
    assert path.stem == COURSE[0] or str(taken) in text
    follower = COURSE.index(path.stem) + 1
    if follower < len(COURSE):
        assert take_up(COURSE[follower], folder / WORK).origin == path.stem
    # Each explorer leaves a picture and its numbers for readers without a kernel.
    for output in made:
        data = output.get("data", {})
        if "application/vnd.jupyter.widget-view+json" in data and "Tab(" not in data["text/plain"]:
            assert len(data["image/png"]) > 1000
            assert len(data["text/plain"]) > 80
