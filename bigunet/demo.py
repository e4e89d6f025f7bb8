"""The tour of `00_start` without a browser: run the notebook, write it as one HTML page."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

from bigunet.errors import OutputError, fail
from bigunet.lab import find_notebook, installed

__all__ = ["demo"]

_WIDGET = "application/vnd.jupyter.widget-view+json"


def demo(
    out_html: str | Path = "bigunet-demo.html",
    *,
    notebook: str = "00_start",
    timeout_seconds: float = 600,
) -> Path:
    """Run a notebook and write what it shows, its plots as pictures, to one page.

    The page holds everything it shows: no script runs in it and nothing is fetched.

    Returns the page's path, after printing it.

    Raises
    ------
    OutputError : where the page cannot be written (seen before the run), or a cell failed.
    """
    path, out = find_notebook(notebook), Path(out_html).resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):
            pass
    except OSError as error:
        fail(OutputError, rule="the page can be written", got=error, remedy="Choose another path.")
    content: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    # The kernel imports this very package, installed or not.
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory(prefix="bigunet-demo-") as scratch:
        client = NotebookClient(
            content,
            timeout=timeout_seconds,
            kernel_name="python3",
            store_widget_state=False,
            resources={"metadata": {"path": scratch if installed(path) else str(path.parent)}},
        )
        try:
            # The kernel's own log says nothing that a reader of the page could use.
            client.execute(env=environment, stderr=subprocess.DEVNULL)
        except CellExecutionError as error:
            reason = str(error).strip().splitlines()[-1]
            fail(OutputError, rule="every cell of the notebook runs", got=reason, remedy="Run it "
                 "in JupyterLab to see where.")  # fmt: skip
    _only_pictures(content)
    exporter = HTMLExporter(template_name="lab")  # type: ignore[no-untyped-call]
    page, _ = exporter.from_notebook_node(content, {"metadata": {"name": path.stem}})
    # Pictures need no scripts, some of which would be fetched.
    page = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    out.write_text(page, encoding="utf-8")
    print(f"Wrote {out}")
    return out


def _only_pictures(content: Any) -> None:
    """Drop what needs a kernel or a script; each plot's PNG and text stay."""
    for cell in content.cells:
        kept = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(_WIDGET, None)
            if str(data.get("text/html", "")).startswith("<script"):
                continue
            kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
