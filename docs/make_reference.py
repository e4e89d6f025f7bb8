"""Write the API reference from the docstrings: `python docs/make_reference.py [FOLDER]`."""

from __future__ import annotations

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc

import bigunet

ROOT = Path(__file__).resolve().parents[1]


def reference(folder: Path) -> Path:
    """A page for each module and sub-package; the command line's reference is its `--help`."""
    parts = sorted(m.name for m in pkgutil.iter_modules(bigunet.__path__))
    names = [f"bigunet.{name}" for name in parts if name not in ("cli", "__main__")]
    pdoc.render.configure(docformat="numpy", footer_text="bigunet", search=True)
    with warnings.catch_warnings():
        # What pdoc cannot make sense of is a defect of ours.
        warnings.filterwarnings("error", module=r"pdoc(\.|$)")
        # The types of a class that is shown in another module than its own stay as written.
        warnings.filterwarnings("ignore", message="Error parsing type annotation")
        pdoc.pdoc("bigunet", *names, output_directory=folder)
    return folder / "index.html"


if __name__ == "__main__":
    print(reference(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
