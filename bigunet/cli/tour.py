"""`bigunet demo` and `bigunet lab`: the tour, as a page or in JupyterLab."""

from __future__ import annotations

import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from bigunet.cli.output import Json, emit

__all__ = ["demo", "lab"]


def demo(
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("bigunet-demo.html"),
    notebook: Annotated[str, typer.Option(help="Name of a notebook, or a path.")] = "00_start",
    json: Json = False,
) -> None:
    """Run a notebook without a browser and write an HTML page with what it shows."""
    import io

    from bigunet.demo import demo as run

    began = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        page = run(out, notebook=notebook)
    seconds = round(time.perf_counter() - began, 1)
    emit({"page": str(page), "seconds": seconds}, [f"Wrote {page} in {seconds} s"], json)


def lab(
    notebook: Annotated[
        str | None,
        typer.Argument(help="Name or path of a notebook: 00_start, with --app all explorers."),
    ] = None,
    app: Annotated[bool, typer.Option("--app", help="A page without code (Voila).")] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[int | None, typer.Option(help="The first free one from 8888.")] = None,
    copy_to: Annotated[
        Path | None, typer.Option(help="Copy the notebooks there, and open the copy.")
    ] = None,
    json: Json = False,
) -> None:
    """Start JupyterLab open on a notebook, and print its address; its token is kept."""
    from bigunet.lab import find_notebook
    from bigunet.lab import lab as run

    if json:
        # The server runs until it is stopped, so what can be said is said first.
        path = find_notebook(notebook or ("app" if app else "00_start"))
        emit({"notebook": str(path), "app": app, "port": port}, [], True)
    raise typer.Exit(run(notebook, app=app, browser=browser, port=port, copy_to=copy_to))
