"""Run a plan: one protocol, three engines; tiles times stages; training.

`Pipeline` binds a plan, a network and an engine: "reference" (one process), "fairscale_pipe" (one
process, any devices) or "distributed" (ranks, gloo or NCCL). `Pipeline.step` sets every
parameter's gradient to that of the whole batch's mean loss.
"""

from bigunet.pipeline.feed import (
    Feed,
    Images,
    Tiles,
    check_plan,
    deal,
    equal_tile,
    equal_tiles,
    read_shape,
)
from bigunet.pipeline.protocol import Engine, EngineName, Places, Stepped
from bigunet.pipeline.run import run_plan
from bigunet.pipeline.step import Pipeline
from bigunet.pipeline.timeline import measured_timeline
from bigunet.pipeline.train import train_plan

__all__ = [
    "Engine",
    "EngineName",
    "Feed",
    "Images",
    "Pipeline",
    "Places",
    "Stepped",
    "Tiles",
    "check_plan",
    "deal",
    "equal_tile",
    "equal_tiles",
    "measured_timeline",
    "read_shape",
    "run_plan",
    "train_plan",
]
