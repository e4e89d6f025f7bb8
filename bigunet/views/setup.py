"""What a notebook runs once, before its first plot."""

from __future__ import annotations

import html

from bokeh.io.notebook import publish_display_data
from bokeh.resources import Resources

from bigunet.views.figures import fix_command
from bigunet.views.page import STYLE

__all__ = ["setup"]

# Seen only where JupyterLab's page lists its extensions and the widgets' is not among them: there
# no widget can say anything.
_NO_WIDGETS = """{style}<div class="bigunet-no-widgets bigunet-notice" role="status" hidden>
This page's server cannot show controls, so each explorer is one still picture. To get them, run
this in a terminal of the same machine (no administrator needed), then restart the server and
reload the page:<pre>{command}</pre></div>
<script>
(() => {{
  const page = document.getElementById('jupyter-config-data');
  const listed = page && JSON.parse(page.textContent).federated_extensions;
  if (listed && !listed.some(e => e.name === '@jupyter-widgets/jupyterlab-manager'))
    document.querySelectorAll('.bigunet-no-widgets').forEach(e => {{ e.hidden = false; }});
}})();
</script>"""

# The sliders of ipywidgets have no name for screen readers: give each its label's.
_NAMES = """
if (!window.bigunetNames) {
  let waiting = false;
  const name = () => {
    waiting = false;
    const handles = '.bigunet-explorer .widget-slider .noUi-handle:not([aria-label])';
    for (const handle of document.querySelectorAll(handles)) {
      const label = handle.closest('.widget-slider').querySelector('.widget-label');
      if (label) handle.setAttribute('aria-label', label.textContent);
    }
  };
  window.bigunetNames = new MutationObserver(() => {
    if (!waiting) { waiting = true; setTimeout(name, 500); }
  });
  window.bigunetNames.observe(document.body, {childList: true, subtree: true});
}
"""


def setup() -> None:
    """Bring Bokeh's script into the page, out of the installed package: nothing is downloaded.

    Bokeh's own `output_notebook` would also bring the scripts of every Bokeh extension that is
    imported (Panel is, by HoloViews), some of which a server must know or else refuses.

    Where the server cannot show any widget, the page says so, and how to change it.
    """
    scripts = Resources(mode="inline", components=["bokeh"]).js_raw
    # A closing tag inside the script would end it early.
    code = "\n".join(scripts).replace("</script", "<\\/script")
    publish_display_data({"text/html": f"<script>{code}\n{_NAMES}</script>"})
    hint = _NO_WIDGETS.format(style=STYLE, command=html.escape(fix_command()))
    publish_display_data({"text/html": hint})
