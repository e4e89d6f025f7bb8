"""`bigunet machines`: what is known of machines, as a table, whole, or as a file to begin with."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from bigunet.cli.inputs import machine_of
from bigunet.cli.output import Json, emit, gib, table
from bigunet.machines import MACHINES, Link, Machine, machine_yaml

__all__ = ["machines"]


def _row(m: Machine) -> tuple[Any, ...]:
    p = m.processor
    return (
        m.name,
        f"{m.num_devices} x {p.name}",
        f"{m.num_nodes:,}",
        f"{p.peak('fp32') / 1e12:.3g}",
        f"{p.peak('bf16') / 1e12:.3g}",
        gib(p.memory_bytes),
        f"{p.bytes_per_second / 1e9:,.0f}",
        _rate(m.inside) if m.num_devices > 1 else "-",
        _rate(m.network) if m.num_nodes > 1 else "-",
        "-" if p.watts is None else f"{p.watts:.0f}",
    )


def _rate(link: Link) -> str:
    return f"{link.bytes_per_second / 1e9:.3g}"


def _details(m: Machine) -> list[str]:
    """One line for each source."""
    p, files = m.processor, m.file_system
    links = dict.fromkeys(link for link in (m.inside, m.across, m.network, m.all_reduce) if link)
    return [
        f"{p.name}: {p.source}",
        *(
            f"{link.name}: {link.bytes_per_second / 1e9:.3g} GB/s, "
            f"{1e6 * link.latency_seconds:.1f} us ({link.source})"
            for link in links
        ),
        f"{files.name}: {files.node_bytes_per_second / 1e9:.3g} GB/s a node, "
        f"{files.total_bytes_per_second / 1e9:.4g} GB/s in all ({files.source})",
        *([m.notes] if m.notes else []),
    ]


def machines(
    name: Annotated[
        str | None, typer.Argument(help="One machine: a name, `here`, or a YAML file.")
    ] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print it as a machine file.")] = False,
    refresh: Annotated[bool, typer.Option(help="Time `here` anew.")] = False,
    json: Json = False,
) -> None:
    """List the machines that plans and predictions are made for, with the sources of figures."""
    chosen = list(MACHINES.values()) if name is None else [machine_of(name, refresh=refresh)]
    if yaml and not json:
        typer.echo("---\n".join(machine_yaml(m) for m in chosen), nl=False)
        return
    header = (
        "machine", "devices of a node", "nodes", "fp32 TFLOP/s", "bf16", "memory", "GB/s",
        "link GB/s", "network GB/s", "W",
    )  # fmt: skip
    lines = table(header, [_row(m) for m in chosen])
    if name is not None:
        lines += ["", *_details(chosen[0])]
    emit({"machines": [dataclasses.asdict(m) for m in chosen]}, lines, json)
