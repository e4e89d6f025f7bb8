"""JupyterLab on this project's notebooks, or one of them as a page without code."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bigunet.errors import OutputError, SceneError, fail

__all__ = ["find_notebook", "lab"]

_HOST = "127.0.0.1"
# JupyterLab would ask the network for news, for its own updates and for extensions.
_SILENT = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
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
    notebook: str = "00_start",
    *,
    app: bool = False,
    browser: bool = True,
    port: int | None = None,
    options: Sequence[str] = (),
) -> int:
    """Start JupyterLab open on a notebook, print its address, and wait until it ends.

    The server asks for its token, as Jupyter's own does: a fresh one, or `JUPYTER_TOKEN`'s.

    Parameters
    ----------
    notebook : name of one of the project's, or a path.
    app : as a page of its outputs without code (Voila), run anew for each visitor.
    browser : whether to open a browser.
    port : by default the first free one from 8888.
    options : more of JupyterLab's command line.

    Returns the server's exit status.
    """
    path = find_notebook(notebook)
    port = _free_port() if port is None else port
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    page = f"/voila/render/{path.name}" if app else f"/lab/tree/{path.name}"
    command = [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={path.parent}"),
        *(f"--ServerApp.ip={_HOST}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--LabApp.default_url={page}", *_SILENT, *options),
    ]
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    print(f"Open http://{_HOST}:{port}{page}?token={token}")
    print("Stop the server with Ctrl-C.", flush=True)
    # By environment: a command line can be read by every user of the machine.
    environment = {**os.environ, "JUPYTER_TOKEN": token}
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The server got the interrupt as well, and asks or ends by itself.
            continue
