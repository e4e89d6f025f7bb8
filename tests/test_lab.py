"""Finding notebooks; the server itself is started by the browser tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from bigunet.errors import OutputError, SceneError
from bigunet.lab import _free_port, copy_notebooks, find_notebook


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


def test_the_copy_keeps_what_is_there(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "course" / "00_start.ipynb"
    mine.parent.mkdir()
    mine.write_text("my answers")
    folder = copy_notebooks(mine.parent)
    names = {p.name for p in (root / "notebooks").glob("*.ipynb")}
    assert {p.name for p in folder.iterdir()} == names
    assert mine.read_text() == "my answers"
    for path in folder.iterdir():
        if path != mine:
            assert path.read_bytes() == (root / "notebooks" / path.name).read_bytes()
    with pytest.raises(OutputError, match="--copy-to"):
        copy_notebooks(mine)


def test_a_wheel_alone_brings_the_course(root: Path, tmp_path: Path) -> None:
    """Built, installed without its dependencies into a fresh environment, and run from there."""
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    home = tmp_path / "environment"
    venv.create(home, system_site_packages=False, with_pip=True)
    python = home / "bin" / "python"
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=quiet)
    # The dependencies are those of the environment that runs the tests, after its own bigunet.
    (package,) = home.glob("lib/python*/site-packages")
    code = (
        f"import sys; sys.path += {[p for p in sys.path if 'site-packages' in p]!r}\n"
        "from bigunet.lab import copy_notebooks, find_notebook, installed\n"
        "start = find_notebook()\n"
        "assert installed(start), start\n"
        "print(start)\n"
        "print(copy_notebooks('mine'))\n"
    )
    notebooks = package / "bigunet" / "notebooks"
    notebooks.chmod(0o555)
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=quiet, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(notebooks / "00_start.ipynb"), str(tmp_path / "mine")]
    for path in (root / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "mine" / path.name).read_bytes() == path.read_bytes()
