"""Imagery in, lazily: files, the built-in Earth, synthetic land, labels and their checks.

Scenes are `xarray.DataArray`s (band, y, x), labels (y, x); a `ScenePair` joins the two. Read
windows with `read_block` and `read_labels`, from any thread. No torch here.
"""

from __future__ import annotations

from .baseline import Baseline, class_iou, colour_lookup_baseline, land_mean_iou
from .classes import OKABE_ITO, ClassTable, default_colours
from .deepglobe import DEEPGLOBE_CLASSES, DeepGlobe, open_deepglobe
from .earth import (
    EARTH_CLASSES,
    EARTH_CREDIT,
    EARTH_SHAPE,
    earth,
    earth_split,
    held_out_labels,
    training_labels,
)
from .labels import class_table, ignore_id, open_labels
from .normalise import Normalise, normalisation
from .open import crop, geotransform, open_scene, read_block, read_labels, valid_block, valid_mask
from .pairs import ScenePair, check_bands, check_classes, iter_blocks, pair
from .synthetic import SYNTHETIC_CLASSES, synthetic
from .write import write_scene

__all__ = [
    "DEEPGLOBE_CLASSES",
    "EARTH_CLASSES",
    "EARTH_CREDIT",
    "EARTH_SHAPE",
    "OKABE_ITO",
    "SYNTHETIC_CLASSES",
    "Baseline",
    "ClassTable",
    "DeepGlobe",
    "Normalise",
    "ScenePair",
    "check_bands",
    "check_classes",
    "class_iou",
    "class_table",
    "colour_lookup_baseline",
    "crop",
    "default_colours",
    "earth",
    "earth_split",
    "geotransform",
    "held_out_labels",
    "ignore_id",
    "iter_blocks",
    "land_mean_iou",
    "normalisation",
    "open_deepglobe",
    "open_labels",
    "open_scene",
    "pair",
    "read_block",
    "read_labels",
    "synthetic",
    "training_labels",
    "valid_block",
    "valid_mask",
    "write_scene",
]
