"""Scenes, labels and weights by the names that a command line gives them.

Imagery needs the `scenes` extra, so it is imported when a command asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from bigunet.errors import SceneError, SpecError, fail

if TYPE_CHECKING:
    from bigunet.checkpoint import Weights
    from bigunet.machines import Machine
    from bigunet.scenes import ScenePair

__all__ = [
    "MACHINES_HELP",
    "NAMES",
    "counts_of",
    "labels_of",
    "machine_of",
    "pair_of",
    "scene_of",
    "weights_of",
]

MACHINES_HELP = "A name (see `bigunet machines`), `here` (timed), or a YAML file."

NAMES = "A file, or `earth`, or `synthetic:HEIGHTxWIDTH` (`:SEED`)."


def counts_of(text: str, name: str, example: str) -> list[int]:
    """The numbers of an option such as `--ranks 1,2,4`.

    Raises
    ------
    SpecError : for anything else, with the option's `name` and an `example`.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fail(SpecError, rule=f"{name} are numbers with commas between", got=text, remedy=example)


def _built_in(name: str) -> ScenePair | None:
    """The pair of a built-in scene; None for a path."""
    from bigunet import scenes

    kind, _, rest = name.partition(":")
    if kind == "earth":
        pair = scenes.earth()
        parts = {
            "": pair.labels,
            "training": scenes.training_labels(pair.labels),
            "held-out": scenes.held_out_labels(pair.labels),
        }
        if rest not in parts:
            fail(
                SceneError,
                rule="the Earth's labels are earth, earth:training or earth:held-out",
                got=name,
                remedy="Use one of these.",
            )
        return pair.with_labels(parts[rest])
    if kind == "synthetic":
        size, _, seed = rest.partition(":")
        try:
            height, width = (int(part) for part in size.split("x"))
            number = int(seed or 0)
        except ValueError:
            fail(
                SceneError,
                rule="a synthetic scene is synthetic:HEIGHTxWIDTH or synthetic:HEIGHTxWIDTH:SEED",
                got=name,
                remedy="synthetic:2048x2048, say.",
            )
        return scenes.synthetic((height, width), number)
    return None


def scene_of(name: str, bands: str | None = None) -> xr.DataArray:
    """The image of a path or a built-in scene; `bands` are 0-based, with commas between."""
    pair = _built_in(name)
    if pair is not None:
        return pair.image
    try:
        chosen = None if bands is None else [int(part) for part in bands.split(",")]
    except ValueError:
        fail(SceneError, rule="bands are numbers with commas between", got=bands, remedy="0,1,2")
    from bigunet.scenes import open_scene

    return open_scene(name, bands=chosen)


def labels_of(name: str) -> xr.DataArray:
    """The labels of a path, a mosaic or a built-in scene."""
    pair = _built_in(name)
    if pair is not None:
        return pair.labels
    if (Path(name) / "zarr.json").exists():
        from bigunet.mosaic import open_mosaic

        opened = open_mosaic(name)
        if "labels" in opened:
            return opened["labels"].assign_attrs({**opened.attrs, **opened["labels"].attrs})
    from bigunet.scenes import open_labels

    return open_labels(name)


def pair_of(image: str, labels: str | None) -> ScenePair:
    """Image and labels, checked; a built-in scene brings its own labels."""
    if labels is not None:
        from bigunet.scenes import pair as join

        return join(scene_of(image), labels_of(labels))
    pair = _built_in(image)
    if pair is None:
        fail(
            SceneError,
            rule="an image of one's own comes with a file of labels",
            got=image,
            remedy="Add --labels FILE.",
        )
    return pair


def weights_of(name: str) -> Weights:
    """The weights in a file, or `demo`: the ones that come with the package."""
    from bigunet.checkpoint import demo_weights, load_weights

    return demo_weights() if name == "demo" else load_weights(name)


def machine_of(name: str, *, refresh: bool = False) -> Machine:
    """A machine by name or file; "here" is this one, timed once and then remembered."""
    if name.lower() == "here":
        from bigunet.here import here

        return here(refresh=refresh)
    from bigunet.machines import machine

    return machine(name)
