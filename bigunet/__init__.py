"""bigunet: train U-Nets on images too large for one device, and understand how.

Importing the package needs no torch: it gives the planning half. The other half lives in its
modules, such as `bigunet.model`, `bigunet.mosaic` and `bigunet.sample_parallel`.
"""

from bigunet.errors import BigUNetError
from bigunet.geometry import Margins, margins
from bigunet.layers import LayerRow, count_parameters, layer_table
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Box, Tile, count_tiles, tile_image, whole_image

__version__ = "0.1.0"

__all__ = [
    "BigUNetError",
    "Box",
    "LayerRow",
    "Margins",
    "Tile",
    "TrainSpec",
    "UNetSpec",
    "count_parameters",
    "count_tiles",
    "layer_table",
    "margins",
    "tile_image",
    "whole_image",
]
