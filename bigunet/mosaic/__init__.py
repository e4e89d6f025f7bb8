"""Mosaics: a scene of any size through the network, tile by tile, with the whole image's result.

    from bigunet.mosaic import segment
    mosaic = segment(model, "scene.tif", out="mosaic.zarr")

`segment` reads, computes and writes at the same time, resumes what was interrupted, and builds a
pyramid of majority votes for viewing.
"""

from __future__ import annotations

from bigunet.mosaic.compute import read_tile
from bigunet.mosaic.network import TileNetwork, cpu_has_bf16, weights_hash
from bigunet.mosaic.open import build_image_pyramid, open_mosaic, pyramid
from bigunet.mosaic.pyramid import IGNORE, average, majority, num_levels
from bigunet.mosaic.segment import InexactWarning, segment

__all__ = [
    "IGNORE",
    "InexactWarning",
    "TileNetwork",
    "average",
    "build_image_pyramid",
    "cpu_has_bf16",
    "majority",
    "num_levels",
    "open_mosaic",
    "pyramid",
    "read_tile",
    "segment",
    "weights_hash",
]
