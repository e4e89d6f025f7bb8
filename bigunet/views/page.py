"""The few pieces of HTML that explorers share: style, table, download link."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

__all__ = ["STYLE", "as_command", "as_table", "download_link", "png_bundle"]

STYLE = """<style>
.bigunet-title { margin: 4px 0 0 0; }
.bigunet-help { margin: 0 0 6px 0; line-height: 1.4; max-width: 62em; }
.bigunet-summary { line-height: 1.4; padding: 6px 8px; margin-top: 6px;
  border-left: 4px solid #0072B2; }
.bigunet-bad { line-height: 1.4; padding: 6px 8px; border-left: 4px solid #D55E00; }
.bigunet-notice { line-height: 1.4; padding: 6px 8px; border-left: 4px solid #E69F00; }
.bigunet-notice pre { white-space: pre-wrap; margin: 4px 0 0 0; }
.bigunet-table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.bigunet-table caption { text-align: left; font-weight: bold; padding-bottom: 4px; }
.bigunet-table th, .bigunet-table td { padding: 2px 10px; text-align: right; line-height: 1.35;
  border-bottom: 1px solid #c8c8c8; }
.bigunet-table th:first-child, .bigunet-table td:first-child { text-align: left; }
.bigunet-legend { list-style: none; margin: 4px 0; padding: 0; display: grid;
  grid-template-columns: auto auto; gap: 0 10px; font-size: 12px; line-height: 1.5; }
.bigunet-legend li { display: flex; align-items: baseline; }
.bigunet-legend span { flex: none; width: 12px; height: 12px; margin-right: 6px;
  border: 1px solid #444; position: relative; top: 2px; }
pre.bigunet-command.bigunet-command { white-space: pre-wrap; word-break: normal;
  overflow-wrap: anywhere; margin: 4px 0; line-height: 1.4; }
.bigunet-links a { margin-right: 12px; text-decoration: underline; white-space: nowrap; }
</style>"""

# Files that are told apart by more than their kind.
_NAMED = {"plan.yaml": "Save plan", "run.sh": "Save command"}
_MIME = {"yaml": "text/yaml", "csv": "text/csv", "sh": "text/x-shellscript"}


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return html.escape(str(value))


def as_table(rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A plain HTML table; the first row is the header."""
    header, *body = rows
    head = "".join(f'<th scope="col">{html.escape(str(h))}</th>' for h in header)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row) + "</tr>" for row in body)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<table class="bigunet-table">{title}<thead><tr>{head}</tr></thead>{lines}</table>'


def as_command(text: str) -> str:
    """A shell command to read and to copy, broken between words."""
    return f'<pre class="bigunet-command" aria-label="Launch command">{html.escape(text)}</pre>'


def download_link(name: str, text: str) -> str:
    """A link that saves `text` under `name`, without a server."""
    kind = _MIME.get(name.rpartition(".")[2], "text/plain")
    data = base64.b64encode(text.encode()).decode()
    label = _NAMED.get(name, f"Save {name.rpartition('.')[2].upper()}")
    return (
        f'<span class="bigunet-links"><a download="{html.escape(name)}" '
        f'href="data:{kind};base64,{data}">{label}</a></span>'
    )


def png_bundle(png: bytes) -> dict[str, str]:
    """The part of a MIME bundle that holds a PNG."""
    return {"image/png": base64.b64encode(png).decode()}
