"""What a command prints: one JSON document with --json, else lines for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from bigunet.errors import BigUNetError

__all__ = ["Json", "Quiet", "emit", "gib", "report", "shown", "table"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


def shown(quiet: bool) -> bool:
    """Whether a progress bar has somebody to see it."""
    return not quiet and sys.stderr.isatty()


def _plain(value: Any) -> Any:
    """Values as JSON knows them; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def emit(values: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print `values` as JSON, or `lines`."""
    typer.echo(json.dumps(_plain(values)) if as_json else "\n".join(lines))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a plain table: text to the left, numbers to the right."""
    body = [list(row) for row in rows]
    cells = [[str(v) for v in row] for row in [header, *body]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [
        bool(body) and all(isinstance(row[i], int | float) for row in body)
        for i in range(len(header))
    ]
    lines = []
    for row in cells:
        padded = [
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def gib(num_bytes: float) -> str:
    """Bytes as people read them: GiB with one decimal."""
    return f"{num_bytes / 2**30:.1f} GiB"


def report(error: BigUNetError, as_json: bool) -> None:
    """Print an error: on stdout as JSON, else on stderr."""
    if as_json:
        parts = {"rule": error.rule, "got": error.got, "remedy": error.remedy}
        typer.echo(json.dumps({"error": {"kind": type(error).__name__, **_plain(parts)}}))
    else:
        typer.echo(f"error: {error}", err=True)
