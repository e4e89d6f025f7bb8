"""Explorers and plots for notebooks. Torch-free: what was measured reaches them as arguments."""

from bigunet.views.halo import HaloExplorer, HaloState
from bigunet.views.kit import Explorer
from bigunet.views.mosaic import MosaicState, MosaicViewer
from bigunet.views.setup import setup

__all__ = ["Explorer", "HaloExplorer", "HaloState", "MosaicState", "MosaicViewer", "setup"]
