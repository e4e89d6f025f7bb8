"""Explorers and plots for notebooks. Torch-free: what was measured reaches them as arguments."""

from bigunet.views.halo import HaloExplorer, HaloState, tile_costs
from bigunet.views.kit import Explorer
from bigunet.views.memory import MemoryExplorer, MemoryState, memory_by_depth
from bigunet.views.mosaic import MosaicState, MosaicViewer
from bigunet.views.scaling import ScalingExplorer, ScalingState
from bigunet.views.setup import setup
from bigunet.views.stage_tables import launch_command
from bigunet.views.stages import StageExplorer, StageState
from bigunet.views.still import Still, plot_against

__all__ = [
    "Explorer",
    "HaloExplorer",
    "HaloState",
    "MemoryExplorer",
    "MemoryState",
    "MosaicState",
    "MosaicViewer",
    "ScalingExplorer",
    "ScalingState",
    "StageExplorer",
    "StageState",
    "Still",
    "launch_command",
    "memory_by_depth",
    "plot_against",
    "setup",
    "tile_costs",
]
