"""`bigunet doctor`: what works here, and the remedy for what does not."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from bigunet.cli.output import Json, emit

__all__ = ["doctor"]


def doctor(
    link_labextensions: Annotated[
        bool,
        typer.Option(
            "--link-labextensions",
            help="Lend this environment's plot extension to every Jupyter server of this user.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check versions, torch, GPU, bf16, kernel and Jupyter server; exit status 1 for a fault."""
    from bigunet.doctor import examine, worst

    done = _link() if link_labextensions else {}
    checks = examine()
    lines = [f"{path} {what}" for path, what in done.items()]
    if done:
        lines.append("Restart the Jupyter server and reload the page.")
    for check in checks:
        lines.append(f"{check.level:8}{check.name}: {check.found}")
        if check.remedy:
            lines.append(f"{'':8}  -> {check.remedy}")
    level = worst(checks)
    values = {
        "level": level,
        "checks": [dataclasses.asdict(check) for check in checks],
        "linked": done,
    }
    emit(values, lines, json)
    if level == "fault":
        raise typer.Exit(1)


def _link() -> dict[str, str]:
    """Link the plots' extension, and the controls' where a server is known to lack it."""
    from bigunet import labextensions as lab

    names = [lab.PLOTS]
    if any(s.sees is not None and lab.MANAGER not in s.sees for s in lab.servers()):
        names.append(lab.MANAGER)
    return {str(path): what for path, what in map(lab.link, names)}
