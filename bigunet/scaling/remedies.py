"""What would fit where a strategy does not."""

from __future__ import annotations

from functools import lru_cache

from bigunet.errors import MemoryBudgetError
from bigunet.machines import Device
from bigunet.memory import CAUSES, largest_tile, memory
from bigunet.scaling.sample_parallel import largest_kind
from bigunet.scaling.setting import Outcome, Setting, Strategy
from bigunet.scaling.stages import stage_work
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["what_fits"]

_MOST_STAGES = 16


def what_fits(setting: Setting, strategy: Strategy, outcome: Outcome) -> str:
    """The cause that takes most, and the largest tile or the fewest stages that fit."""
    if outcome.memory_bytes <= setting.machine.processor.memory_bytes:
        return ""
    if strategy == "sample-parallel":
        return _tiles(
            setting.spec, setting.train, setting.device, setting.shape, outcome.tile,
            setting.cropped,
        )  # fmt: skip
    if strategy == "halo-exchange":
        return "more GPUs make the blocks smaller"
    return _stages(setting, outcome)


@lru_cache(maxsize=256)
def _tiles(
    spec: UNetSpec,
    train: TrainSpec,
    device: Device,
    shape: tuple[int, int],
    tile: int,
    cropped: bool,
) -> str:
    box = largest_kind(spec, shape, tile, train.halo, cropped)
    read = (train.batch, spec.in_channels, *box.read.shape)
    table = memory(spec, read, train, tile=box, device=device)
    at_peak = table["at_peak"].values[0]
    cause = CAUSES[int(at_peak.argmax())]
    most = f"most of it {cause} ({at_peak.max() / 2**30:.1f} GiB)"
    try:
        fit = largest_tile(
            spec, train, device.memory_bytes, halo=train.halo, cropped=cropped, device=device,
            keep_gradients=True,
        )  # fmt: skip
    except MemoryBudgetError as error:
        return f"{most}; no tile fits: {error.rule}"
    return f"{most}; a tile of {fit.size} fits"


def _stages(setting: Setting, outcome: Outcome) -> str:
    """The fewest stages that fit with as many micro-batches a stage."""
    have = setting.machine.processor.memory_bytes
    for stages in range(outcome.stages + 1, _MOST_STAGES + 1):
        work = stage_work(setting, outcome.tile, stages, outcome.micro_batches, 1)
        if work is None:
            break
        if max(work.peaks) <= have:
            return f"{stages} stages fit"
    for count in (m for m in (8, 4, 2, 1) if m < outcome.micro_batches):
        work = stage_work(setting, outcome.tile, outcome.stages, count, outcome.pipelines)
        if work is not None and max(work.peaks) <= have:
            return f"{count} micro-batches fit"
    return "a smaller tile, recomputation or 1f1b may fit"
