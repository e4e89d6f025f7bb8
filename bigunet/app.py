"""All explorers on one page, for a lecture: `bigunet lab --app` shows it without code.

One tab each, built when it is first opened, so that the page is there at once. torch is needed
only for the demo network's prediction, and imported when that is asked for.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from bigunet.errors import BigUNetError
from bigunet.scenes import ScenePair, earth
from bigunet.spec import UNetSpec
from bigunet.views import (
    Explorer,
    HaloExplorer,
    MemoryExplorer,
    MosaicViewer,
    ScalingExplorer,
    StageExplorer,
)

__all__ = ["SECTIONS", "app"]

# A part of the Earth scene with land, sea and coast, as in the first notebook.
_WINDOW = (260, 1040, 2250, 3450)
_TILE = 384
# The other tabs' names are too pale on their grey for some eyes.
_STYLE = "<style>.bigunet-app .lm-TabBar-tabLabel { color: #222; }</style>"


def app() -> widgets.VBox:
    """A heading and a tab for each of `SECTIONS`; the first is built at once."""
    head = widgets.HTML(
        f"{_STYLE}<h1>bigunet: images larger than a device</h1><p>Each tab is one explorer. "
        "Change a control, by mouse or keyboard, and plot, numbers and table follow.</p>"
    )
    panels = [widgets.VBox() for _ in SECTIONS]
    tabs = widgets.Tab(children=panels, titles=list(SECTIONS), selected_index=0)
    sections = list(SECTIONS.values())

    def opened(change: Mapping[str, Any]) -> None:
        index = change["new"]
        if index is not None and not panels[index].children:
            _fill(panels[index], *sections[index])

    tabs.observe(opened, names="selected_index")
    opened({"new": 0})
    page = widgets.VBox([head, tabs])
    page.add_class("bigunet-app")
    return page


def _fill(panel: widgets.VBox, question: str, make: Callable[[], widgets.Widget]) -> None:
    """Build a tab's content; what hinders it is said there, since this page has no other place."""
    head = widgets.HTML(f"<h2>{html.escape(question)}</h2>")
    panel.children = [head, _text("Building it takes a moment.")]
    try:
        panel.children = [head, make()]
    except (BigUNetError, ImportError) as error:
        panel.children = [head, _text(str(error))]


def _text(words: str) -> widgets.HTML:
    return widgets.HTML(f'<p role="status">{html.escape(words)}</p>')


def _shown(explorer: Explorer[Any]) -> widgets.Widget:
    # Voila runs the cells first and loads its page then, on a busy server a minute later.
    explorer.appear(patience=30)
    return explorer.view


def _halo() -> widgets.Widget:
    return _shown(HaloExplorer())


def _memory() -> widgets.Widget:
    return _shown(MemoryExplorer())


def _stages() -> widgets.Widget:
    spec = UNetSpec.torchgpipe(6, 72)
    return _shown(StageExplorer(spec, (32, 3, 192, 192), stages=4, micro_batches=8))


def _scaling() -> widgets.Widget:
    return _shown(ScalingExplorer())


def _mosaic() -> widgets.Widget:
    """Imagery and labels at once; the demo network's prediction when its button is pressed."""
    scene = earth().crop(*_WINDOW)
    viewer = MosaicViewer(scene.image, scene.labels, classes=scene.classes, tile=_TILE)
    button = widgets.Button(
        description="Segment by the demo network",
        tooltip="Predict this scene's classes, tile by tile",
        layout=widgets.Layout(width="auto"),
    )
    said = _text("")
    box = widgets.VBox([widgets.HBox([button, said]), _shown(viewer)])
    tasks: list[asyncio.Task[None]] = []

    async def segmented() -> None:
        button.disabled = True
        said.value = _text("Segmenting: about ten seconds on two cores.").value
        try:
            # In a thread, so that the controls keep answering.
            spec, labels = await asyncio.to_thread(_segment, scene)
        except (BigUNetError, ImportError) as error:
            said.value = _text(str(error)).value
            button.disabled = False
            return
        viewer = MosaicViewer(
            scene.image, scene.labels, labels, classes=scene.classes, spec=spec, tile=_TILE
        )
        box.children = [_shown(viewer)]

    button.on_click(lambda _: tasks.append(asyncio.get_running_loop().create_task(segmented())))
    return box


def _segment(scene: ScenePair) -> tuple[UNetSpec, Sequence[Any]]:
    from bigunet.checkpoint import demo_weights
    from bigunet.mosaic import pyramid, segment

    network = demo_weights()
    return network.spec, pyramid(segment(network, scene.image, tile=_TILE, progress=False))


# Title of the tab, the question it answers, and what it holds.
SECTIONS: Mapping[str, tuple[str, Callable[[], widgets.Widget]]] = {
    "Halo": ("What must a tile read around its core?", _halo),
    "Memory": ("What fills a device's memory?", _memory),
    "Stages": ("Where should the network be cut into stages?", _stages),
    "Scaling": ("What does one more GPU buy?", _scaling),
    "Mosaic": ("What does a network make of a large scene?", _mosaic),
}
