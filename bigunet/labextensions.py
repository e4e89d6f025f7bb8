"""The two JupyterLab extensions that explorers live on, as the server sees them.

Widgets and plots need a part in the page, which the *server* hands out, from its own
environment's `share/jupyter/labextensions` or from the user's data folder. On a hub the server's
environment is not the kernel's: what is installed beside the kernel is then not in the page.
A link in the user's folder lends it, without administrator rights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir, jupyter_path, jupyter_runtime_dir

from bigunet.errors import OutputError, fail

__all__ = [
    "MANAGER",
    "NEEDED",
    "PLOTS",
    "Server",
    "find",
    "link",
    "servers",
    "source",
    "version",
    "visible",
]

MANAGER, PLOTS = "@jupyter-widgets/jupyterlab-manager", "@bokeh/jupyter_bokeh"
NEEDED = {MANAGER: "the controls", PLOTS: "the plots"}

_TIMEOUT_SECONDS = 10
_ASK_PATHS = (
    "import json; from jupyter_core.paths import jupyter_path; "
    "print(json.dumps(jupyter_path('labextensions')))"
)


@dataclass(frozen=True)
class Server:
    """A Jupyter server that may serve this kernel; `sees` is None where that stays unknown."""

    name: str
    running: bool
    sees: frozenset[str] | None


def find(name: str, folders: Iterable[str | Path]) -> Path | None:
    """The first of these labextensions folders' extensions of that name."""
    places = (Path(folder) / name for folder in folders)
    return next((p for p in places if (p / "package.json").is_file()), None)


def version(extension: Path) -> str:
    """An installed extension's version."""
    return str(json.loads((extension / "package.json").read_text(encoding="utf-8"))["version"])


def source(name: str) -> Path | None:
    """The extension as it lies beside this interpreter's packages, where it is installed."""
    bases = [sys.prefix, sys.base_prefix, *([site.USER_BASE] if site.USER_BASE else [])]
    return find(name, (Path(base) / "share" / "jupyter" / "labextensions" for base in bases))


# Servers ----------------------------------------------------------------------------------------


def servers() -> list[Server]:
    """This user's running servers; where there is none, those that would be started.

    A running one is asked for its page's settings, with the token from the user's own runtime
    folder; one that does not let itself be asked (a hub's) is judged by its process's folders.
    """
    found = [s for s in map(_running, _records()) if s is not None]
    if found:
        return found
    beside = Path(sys.executable).parent / "jupyter-lab"
    first = shutil.which("jupyter-lab")
    commands = [*([Path(first)] if first else []), *([beside] if beside.is_file() else [])]
    return [
        Server(str(command), False, _by_folders(str(_interpreter(command)), dict(os.environ)))
        for command in dict.fromkeys(commands)
    ]


def _records() -> list[dict[str, Any]]:
    """What running servers wrote about themselves."""
    found = []
    for path in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # it is just being written or removed
    return found


def _running(record: dict[str, Any]) -> Server | None:
    try:
        os.kill(int(record["pid"]), 0)
    except (KeyError, OSError, ValueError):
        return None  # it ended without tidying up
    url = str(record.get("url", ""))
    sees = _by_page(url, str(record.get("token", "")))
    if sees is None:
        sees = _by_process(int(record["pid"]))
    return Server(url, True, sees)


def _by_page(url: str, token: str) -> frozenset[str] | None:
    headers = {"Authorization": f"token {token}"} if token else {}
    request = urllib.request.Request(f"{url}lab", headers=headers)
    # Never by way of a proxy: the server is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            page = answer.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    settings = re.search(r'id="jupyter-config-data"[^>]*>(.*?)</script>', page, re.DOTALL)
    try:
        listed = json.loads(settings[1])["federated_extensions"] if settings else None
    except (KeyError, ValueError):
        return None
    return None if listed is None else frozenset(str(item["name"]) for item in listed)


def _by_process(pid: int) -> frozenset[str] | None:
    folder = Path("/proc") / str(pid)
    try:
        interpreter = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
        pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return _by_folders(interpreter, environment)


def _by_folders(interpreter: str, environment: dict[str, str]) -> frozenset[str] | None:
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK_PATHS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
        )
        folders = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return frozenset(name for name in NEEDED if find(name, folders))


def _interpreter(command: Path) -> Path:
    """The Python of an installed script: that of its first line, else the one beside it."""
    try:
        first = command.read_bytes().split(b"\n", 1)[0].decode()
    except (OSError, UnicodeDecodeError):
        first = ""
    named = Path(first.removeprefix("#!").strip().split(" ")[0]) if first.startswith("#!") else None
    if named is not None and named.name.startswith("python") and named.is_file():
        return named
    return command.parent / "python"


# Linking ----------------------------------------------------------------------------------------


def link(name: str = PLOTS) -> tuple[Path, str]:
    """Link this environment's extension into the user's Jupyter data folder.

    That folder is `JUPYTER_DATA_DIR`'s or the platform's; every server of the user reads it.
    Linking twice changes nothing; a link to elsewhere is replaced.

    Returns the link's path and what was done.

    Raises
    ------
    OutputError : where this environment lacks the extension, where a real file or folder of
        another origin is in the way, or where the folder cannot be written.
    """
    own = source(name)
    if own is None:
        fail(
            OutputError,
            rule=f"the extension {name} is installed beside the kernel",
            got=f"none below {sys.prefix}",
            remedy=f'Install it: {sys.executable} -m pip install "bigunet[lab]".',
        )
    target = Path(jupyter_data_dir()) / "labextensions" / name
    if target.exists() and target.resolve() == own.resolve():
        return target, "is there already"
    if target.exists() and not target.is_symlink():
        fail(
            OutputError,
            rule=f"{target} is free, or a link",
            got="a folder of another installation",
            remedy="Remove or update that one first; it is left as it was.",
        )
    before = os.readlink(target) if target.is_symlink() else ""
    # Made beside and moved: no moment without a link, and none half made.
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to(own, target_is_directory=True)
        made.replace(target)
    except OSError as error:
        if made.is_symlink():
            made.unlink()
        fail(
            OutputError,
            rule=f"{target.parent} can be written",
            got=error,
            remedy="Set JUPYTER_DATA_DIR, for the server too, to a folder of your own.",
        )
    return target, f"linked to {own}" + (f" instead of {before}" if before else "")


def visible(name: str) -> Path | None:
    """The extension as a server with this environment's and the user's folders sees it."""
    return find(name, jupyter_path("labextensions"))
