"""What a notebook runs once, before its first plot."""

from __future__ import annotations

from bokeh.io import output_notebook
from bokeh.resources import Resources

__all__ = ["setup"]


def setup() -> None:
    """Bring Bokeh's script into the page, out of the installed package: nothing is downloaded."""
    output_notebook(Resources(mode="inline", components=["bokeh"]), hide_banner=True)
