"""A hub's server: an environment of its own, beside the kernel's, with JupyterLab alone.

It is a virtual environment that holds just the data and configuration that pip installs for the
given packages and what they require. Its Python code is borrowed from the tests' environment, so
that nothing is downloaded. What a server hands to a page comes from the data alone.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from test_imports import requirement_closure

__all__ = ["make_hub", "register_kernel"]


def make_hub(folder: Path, packages: list[str]) -> str:
    """Make the environment; its interpreter's path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    borrowed = next(folder.glob("lib/python*/site-packages")) / "borrowed.pth"
    borrowed.write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    home = Path(sys.prefix)
    for name in requirement_closure(packages):
        for file in importlib.metadata.files(name) or []:
            path = Path(os.path.normpath(Path(str(file.locate()))))
            if not path.is_relative_to(home):
                continue
            inside = path.relative_to(home)
            if inside.parts[0] in ("share", "etc") and "jupyter" in inside.parts:
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                # A copy: servers refuse files that lie outside their own folders.
                shutil.copyfile(path, folder / inside)
    return str(folder / "bin" / "python")


def register_kernel(data: Path) -> None:
    """Make this environment's kernel known to the user's servers, as on an HPC centre."""
    subprocess.run(
        [sys.executable, "-m", "ipykernel", "install", "--user", "--name", "bigunet"],
        env={**os.environ, "JUPYTER_DATA_DIR": str(data)},
        check=True,
        capture_output=True,
    )
