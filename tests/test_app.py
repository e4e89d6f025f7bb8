"""The page of all explorers without a browser: tabs are built when opened, and say what fails."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import nbformat
import pytest

from bigunet import app as module
from bigunet.app import SECTIONS, app
from bigunet.errors import SceneError
from bigunet.lab import find_notebook


def tabs_of(page: widgets.VBox) -> widgets.Tab:
    (tabs,) = [child for child in page.children if isinstance(child, widgets.Tab)]
    return tabs


def texts(widget: Any) -> str:
    own = widget.value if isinstance(widget, widgets.HTML) else ""
    return own + "".join(texts(child) for child in getattr(widget, "children", ()))


def test_a_tab_is_built_when_it_is_first_opened() -> None:
    tabs = tabs_of(app())
    assert tabs.titles == tuple(SECTIONS)
    assert [bool(panel.children) for panel in tabs.children] == [True, *[False] * 4]
    assert "halo 94 pixels" in texts(tabs.children[0])
    for index, expected in enumerate(
        ("halo", "fits", "Predicted for summit", "sample-parallel on 1,536 GPUs", "water")
    ):
        tabs.selected_index = index
        question = list(SECTIONS.values())[index][0].replace("'", "&#x27;")
        assert f"<h2>{question}</h2>" in texts(tabs.children[index])
        assert expected.lower() in texts(tabs.children[index]).lower()
    built = [panel.children for panel in tabs.children]
    tabs.selected_index = 0
    assert [panel.children for panel in tabs.children] == built, "not built again"


def test_planning_tabs_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from bigunet.app import app\n"
        "page = app(); tabs = page.children[1]\n"
        "for index in range(5): tabs.selected_index = index\n"
        "print([len(panel.children) for panel in tabs.children])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2, 2, 2, 2, 2]"


def test_what_hinders_a_tab_is_said_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> widgets.Widget:
        raise SceneError("a scene is there", "none", "Bring one.")

    monkeypatch.setattr(module, "SECTIONS", {"Broken": ("Why?", broken)})
    (panel,) = tabs_of(app()).children
    assert "a scene is there; got none. Bring one." in texts(panel)


def test_the_demo_network_s_prediction_joins_the_mosaic() -> None:
    async def press() -> widgets.VBox:
        box = module._mosaic()
        button = box.children[0].children[0]
        button.click()
        assert not button.disabled or button.description
        for _ in range(1200):
            await asyncio.sleep(0.05)
            if len(box.children) == 1:
                return box
        raise AssertionError(texts(box))

    began = time.monotonic()
    box = asyncio.run(press())
    print(f"\nsegmented after {time.monotonic() - began:.1f} s")
    assert "of all labelled pixels agree" in texts(box)


def test_the_page_is_a_notebook_of_the_package_without_outputs() -> None:
    path = find_notebook("app")
    assert path.parent == Path(module.__file__).parent / "notebooks"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (cell,) = notebook.cells
    assert cell.outputs == []
    kinds = {type(node) for node in ast.walk(ast.parse(cell.source))}
    assert not kinds & {ast.FunctionDef, ast.ClassDef}
    assert notebook.metadata["kernelspec"]["name"] == "python3"
