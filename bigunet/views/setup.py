"""What a notebook runs once, before its first plot."""

from __future__ import annotations

from bokeh.io.notebook import publish_display_data
from bokeh.resources import Resources

__all__ = ["setup"]


def setup() -> None:
    """Bring Bokeh's script into the page, out of the installed package: nothing is downloaded.

    Bokeh's own `output_notebook` would also bring the scripts of every Bokeh extension that is
    imported (Panel is, by HoloViews), some of which a server must know or else refuses.
    """
    scripts = Resources(mode="inline", components=["bokeh"]).js_raw
    # A closing tag inside the script would end it early.
    code = "\n".join(scripts).replace("</script", "<\\/script")
    publish_display_data({"text/html": f"<script>{code}</script>"})
