"""JupyterLab on this project's notebooks, or one of them as a page without code."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bigunet.errors import OutputError, SceneError, fail

__all__ = ["copy_notebooks", "find_notebook", "installed", "lab"]

_HOST = "127.0.0.1"
# Of an installed package, which is no place to work in and may be read-only.
_INSTALLED = Path(__file__).resolve().parent / "notebooks"
# JupyterLab would ask the network for news, for its own updates and for extensions.
_SILENT = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)
# Voila would fetch style sheets and MathJax, and complain about extensions it cannot load. The
# pages hold no mathematics: an empty stand-in does, at whose end Voila writes a question mark.
_NO_MATHS = (
    "data:text/javascript,window.MathJax={Hub:{Config(){},Configured(){},Queue(){},"
    "Register:{StartupHook(){}}}}//"
)
_APP = (
    "--VoilaConfiguration.template=bigunet",
    "--VoilaConfiguration.extension_allowlist="
    "['@voila-dashboards/widgets-manager8', '@jupyter-widgets/jupyterlab-manager', "
    "'@bokeh/jupyter_bokeh']",
    f"--ServerApp.tornado_settings={{'mathjax_url': '{_NO_MATHS}'}}",
)


def find_notebook(name: str = "00_start") -> Path:
    """The notebook of that name or path: of the checkout, or of the installed package.

    Raises
    ------
    SceneError : where there is none.
    """
    here = Path(__file__).resolve().parent
    stem = name.removesuffix(".ipynb")
    folders = (here.parent / "notebooks", here / "notebooks")
    places = (Path(f"{stem}.ipynb"), *(folder / f"{stem}.ipynb" for folder in folders))
    found = next((place.resolve() for place in places if place.is_file()), None)
    if found is None:
        known = sorted({p.stem for folder in folders for p in folder.glob("*.ipynb")})
        fail(
            SceneError,
            rule="a notebook is named by its path or its name",
            got=name,
            remedy=f"Use one of {', '.join(known)}." if known else "Run it from a checkout.",
        )
    return found


def installed(notebook: Path) -> bool:
    """Whether a notebook lies in the installed package, so that it is to be run from a copy."""
    return notebook.parent == _INSTALLED


def copy_notebooks(folder: str | Path) -> Path:
    """Copy the course's notebooks to a folder of one's own; those already there are kept.

    Raises
    ------
    OutputError : where the folder cannot be written to.
    """
    target, source = Path(folder).resolve(), find_notebook("00_start").parent
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.glob("*.ipynb")):
            if not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
    except OSError as error:
        fail(
            OutputError,
            rule="the notebooks are copied to a folder that can be written to",
            got=error,
            remedy="Name another: --copy-to FOLDER.",
        )
    return target


def _free_port(first: int = 8888, count: int = 100) -> int:
    for port in range(first, first + count):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    fail(
        OutputError,
        rule="JupyterLab needs a free port",
        got=f"{first} to {first + count - 1} taken",
        remedy="Pass another port.",
    )


def lab(
    notebook: str | None = None,
    *,
    app: bool = False,
    browser: bool = True,
    port: int | None = None,
    copy_to: str | Path | None = None,
    options: Sequence[str] = (),
) -> int:
    """Start JupyterLab open on a notebook, print its address, and wait until it ends.

    The server asks for its token, as Jupyter's own does: a fresh one, or `JUPYTER_TOKEN`'s.

    Parameters
    ----------
    notebook : name of one of the project's, or a path; `00_start` by default, and with `app` the
        page of all explorers.
    app : as a page of its outputs without code (Voila), run anew for each visitor.
    browser : whether to open a browser.
    port : by default the first free one from 8888.
    copy_to : copy the course's notebooks there first, and open the copy. Those of an installed
        package are always opened so, by default from `bigunet-notebooks`.
    options : more of JupyterLab's command line.

    Returns the server's exit status.
    """
    path = find_notebook(notebook or ("app" if app else "00_start"))
    if copy_to is not None or (installed(path) and not app):
        folder = copy_notebooks("bigunet-notebooks" if copy_to is None else copy_to)
        print(f"The notebooks are in {folder}")
        path = folder / path.name
    port = _free_port() if port is None else port
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    page = f"/voila/render/{path.name}" if app else f"/lab/tree/{path.name}"
    command = [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={path.parent}"),
        *(f"--ServerApp.ip={_HOST}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--LabApp.default_url={page}", *_SILENT, *(_APP if app else ()), *options),
    ]
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    print(f"Open http://{_HOST}:{port}{page}?token={token}")
    print("Stop the server with Ctrl-C.", flush=True)
    # By environment: a command line can be read by every user of the machine.
    environment = {**os.environ, "JUPYTER_TOKEN": token}
    if app:
        # Where the page's template lies.
        paths = [str(Path(__file__).parent / "data" / "jupyter"), os.environ.get("JUPYTER_PATH")]
        environment["JUPYTER_PATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The server got the interrupt as well, and asks or ends by itself.
            continue
