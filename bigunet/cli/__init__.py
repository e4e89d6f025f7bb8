"""The command line: `bigunet COMMAND --help`.

Every command takes `--json`. A bad input ends with exit status 2 and says rule, value and remedy.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

import bigunet
from bigunet.cli import (
    budget,
    choosing,
    health,
    launching,
    machines,
    network,
    output,
    plans,
    scaling,
    scene,
    tour,
    training,
)
from bigunet.errors import BigUNetError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train and run U-Nets on images too large for one device, and understand how.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(bigunet.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


COMMANDS = (
    network.info,
    network.halo,
    budget.memory,
    budget.fit,
    plans.stages,
    plans.simulate,
    machines.machines,
    scaling.scale,
    choosing.best,
    training.train,
    launching.launch,
    scene.segment,
    scene.score,
    tour.demo,
    tour.lab,
    health.doctor,
)
for command in COMMANDS:
    app.command()(command)


def _warn(message: Warning | str, *_place: Any) -> None:
    typer.echo(f"warning: {message}", err=True)


def main() -> None:
    """Run the command line; the entry point of `bigunet` and `python -m bigunet`."""
    setattr(warnings, "showwarning", _warn)  # noqa: B010
    try:
        app()
    except BigUNetError as error:
        output.report(error, "--json" in sys.argv)
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "bigunet":
            raise
        said = BigUNetError(
            "this command needs packages that a plain installation leaves out",
            f"no module named {missing}",
            'Install them: pip install "bigunet[train]", or "bigunet[lab]" for demo and lab.',
        )
        output.report(said, "--json" in sys.argv)
        sys.exit(2)
