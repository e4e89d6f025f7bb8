"""The page that `bigunet demo` writes: pictures and numbers, no script, nothing fetched."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from bigunet.demo import demo
from bigunet.errors import OutputError


def notebook(folder: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    path = folder / "small.ipynb"
    nbformat.write(made, path)
    return path


def test_the_page_holds_pictures_and_text_and_needs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(
        tmp_path,
        "from bigunet.views import HaloExplorer, setup\nsetup()",
        "HaloExplorer()",
        "print('and then', 6 * 7)",
    )
    out = demo(tmp_path / "new" / "page.html", notebook=str(path))
    page = out.read_text()
    assert str(out) in capsys.readouterr().out
    assert "data:image/png;base64," in page
    assert "and then 42" in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert "outputs" not in path.read_text() or not nbformat.read(path, 4).cells[1].outputs


def test_a_cell_that_fails_is_told(tmp_path: Path) -> None:
    path = notebook(tmp_path, "raise RuntimeError('no luck today')")
    with pytest.raises(OutputError, match="no luck today"):
        demo(tmp_path / "page.html", notebook=str(path))


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can be written"):
        demo(tmp_path / "file" / "page.html")
