"""What servers hand out, asked of real ones' folders and processes, and links that lend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bigunet.errors import OutputError
from bigunet.labextensions import MANAGER, PLOTS, find, link, servers, source, version


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's Jupyter data folder of its own, by JUPYTER_DATA_DIR."""
    folder = tmp_path / "data"
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return folder


def extension(folder: Path, name: str, release: str = "9.9.9") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "package.json").write_text(json.dumps({"name": name, "version": release}))
    return path


def test_the_extensions_lie_beside_the_packages() -> None:
    for name in (MANAGER, PLOTS):
        own = source(name)
        assert own is not None
        assert own.is_relative_to(sys.prefix)
    assert version(source(PLOTS)).startswith("4.")  # type: ignore[arg-type]
    assert source("@nobody/nothing") is None


def test_linking_lends_and_linking_again_changes_nothing(data: Path) -> None:
    target, what = link()
    assert target == data / "labextensions" / "@bokeh" / "jupyter_bokeh"
    assert what.startswith("linked to")
    assert target.resolve() == source(PLOTS).resolve()  # type: ignore[union-attr]
    assert find(PLOTS, [data / "labextensions"]) == target
    before = os.lstat(target)
    assert link() == (target, "is there already")
    assert os.lstat(target) == before
    assert [p.name for p in target.parent.iterdir()] == ["jupyter_bokeh"]


def test_without_jupyters_own_variable_the_platforms_folder_is_used(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    environment |= {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "xdg")}
    code = "from bigunet.labextensions import link; print(link()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    made = Path(done.stdout.strip())
    assert made.is_symlink()
    assert made == tmp_path / "xdg" / "jupyter" / "labextensions" / "@bokeh" / "jupyter_bokeh"


@pytest.mark.parametrize("alive", [True, False])
def test_a_link_to_elsewhere_is_replaced(data: Path, tmp_path: Path, alive: bool) -> None:
    other = extension(tmp_path / "other", PLOTS) if alive else tmp_path / "gone"
    target = data / "labextensions" / PLOTS
    target.parent.mkdir(parents=True)
    target.symlink_to(other)
    assert str(other) in link()[1]
    assert target.resolve() == source(PLOTS).resolve()  # type: ignore[union-attr]
    assert other.exists() == alive


def test_a_real_folder_of_another_installation_is_left_alone(data: Path) -> None:
    theirs = extension(data / "labextensions", PLOTS)
    before = sorted(p.name for p in theirs.iterdir())
    with pytest.raises(OutputError, match="left as it was"):
        link()
    assert not theirs.is_symlink()
    assert sorted(p.name for p in theirs.iterdir()) == before
    assert version(theirs) == "9.9.9"


def test_a_folder_that_cannot_be_written_is_told(data: Path) -> None:
    data.write_text("a file where a folder should be")
    with pytest.raises(OutputError, match="JUPYTER_DATA_DIR"):
        link()


def test_an_extension_that_is_not_here_is_told(data: Path) -> None:
    with pytest.raises(OutputError, match="beside the kernel"):
        link("@nobody/nothing")
    assert not data.exists()


# Servers ----------------------------------------------------------------------------------------


def test_without_a_running_server_the_one_on_the_path_is_judged(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (own,) = servers()
    assert not own.running
    assert own.sees == {MANAGER, PLOTS}


def other_environment(folder: Path) -> Path:
    """A virtual environment of its own prefix that borrows this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    paths = "\n".join(p for p in sys.path if p.endswith("site-packages"))
    (packages / "borrowed.pth").write_text(paths)
    return folder


def test_a_server_of_another_environment_lacks_them_until_linked(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_environment(tmp_path / "hub")
    command = other / "bin" / "jupyter-lab"
    command.write_text(f"#!{other}/bin/python\nfrom jupyterlab.labapp import main\nmain()\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    theirs, own = servers()
    assert theirs.name == str(command)
    assert theirs.sees == frozenset()
    assert own.sees == {MANAGER, PLOTS}
    extension(other / "share" / "jupyter" / "labextensions", MANAGER)
    assert servers()[0].sees == {MANAGER}
    link()
    assert servers()[0].sees == {MANAGER, PLOTS}


class _Page(BaseHTTPRequestHandler):
    """The part of JupyterLab's page that lists its extensions, for those who know the token."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "token good"
        self.send_response(200 if known and self.path == "/base/lab" else 403)
        self.end_headers()
        settings = {"federated_extensions": [{"name": MANAGER, "load": "x.js"}]}
        page = f'<script id="jupyter-config-data" type="x">{json.dumps(settings)}</script>'
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/base/"
        server.shutdown()
        thread.join()


def record(tmp_path: Path, name: str, **values: object) -> None:
    path = tmp_path / "runtime" / f"jpserver-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))


def test_a_running_server_is_asked_with_its_token(data: Path, tmp_path: Path, address: str) -> None:
    record(tmp_path, "1", url=address, token="good", pid=os.getpid())
    (found,) = servers()
    assert found.running
    assert found.name == address
    assert found.sees == {MANAGER}


def test_one_that_does_not_answer_is_judged_by_its_process(
    data: Path, tmp_path: Path, address: str
) -> None:
    record(tmp_path, "1", url=address, token="bad", pid=os.getpid())
    (found,) = servers()
    assert found.running
    assert found.sees == {MANAGER, PLOTS}


def test_what_ended_or_is_half_written_is_no_server(data: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record(tmp_path, "1", url="http://127.0.0.1:9/", token="", pid=ended.pid)
    (tmp_path / "runtime" / "jpserver-2.json").write_text("{")
    assert not any(server.running for server in servers())
