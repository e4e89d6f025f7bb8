"""Finding notebooks; the server itself is started by the browser tests."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bigunet.errors import SceneError
from bigunet.lab import _free_port, find_notebook


def test_notebooks_are_found_by_name_and_by_path(root: Path, tmp_path: Path) -> None:
    start = root / "notebooks" / "00_start.ipynb"
    assert find_notebook() == start
    assert find_notebook("00_start.ipynb") == start
    own = tmp_path / "own.ipynb"
    own.write_text("{}")
    assert find_notebook(str(own)) == own
    with pytest.raises(SceneError, match="00_start"):
        find_notebook("99_nothing")


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _free_port(port, 50) > port
