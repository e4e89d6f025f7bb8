"""One strategy on one number of GPUs: the way into all four."""

from __future__ import annotations

from bigunet.errors import PlanError, fail
from bigunet.geometry import padded_size
from bigunet.scaling.halo_exchange import halo_exchange
from bigunet.scaling.sample_parallel import sample_parallel
from bigunet.scaling.setting import STRATEGIES, Outcome, Setting, Strategy
from bigunet.scaling.stages import stages

__all__ = ["check_strategy", "evaluate", "tile_of"]


def check_strategy(strategy: str) -> Strategy:
    """`strategy`; raises `PlanError` for an unknown one."""
    for known in STRATEGIES:
        if known == strategy:
            return known
    fail(
        PlanError,
        rule=f"a strategy is one of {', '.join(STRATEGIES)}",
        got=strategy,
        remedy="Choose one of them.",
    )


def tile_of(setting: Setting, tile: int | None) -> int:
    """`tile`, or `train.tile` cut down to the image and up to the stride."""
    if tile is not None:
        return tile
    stride = setting.spec.stride
    most = min(padded_size(n, stride) for n in setting.shape)
    return min(padded_size(setting.train.tile, stride), most)


def evaluate(
    setting: Setting,
    strategy: Strategy,
    gpus: int,
    *,
    tile: int | None = None,
    num_stages: int | None = None,
    micro_batches: int | None = None,
    only_fitting: bool = False,
) -> Outcome:
    """The prediction for `gpus` GPUs; see `bigunet.scaling.predict` for what is predicted.

    "pipeline" is one pipeline of `num_stages` stages, all GPUs by default. `only_fitting` leaves
    the seconds of what does not fit the memory at infinity.
    """
    if strategy == "halo-exchange":
        return halo_exchange(setting, gpus, only_fitting=only_fitting)
    size = tile_of(setting, tile)
    if strategy == "sample-parallel":
        return sample_parallel(setting, gpus, size, only_fitting=only_fitting)
    one = strategy == "pipeline"
    return stages(
        setting,
        gpus,
        size,
        (num_stages or gpus) if one else num_stages,
        micro_batches,
        most=1 if one else None,
        only_fitting=only_fitting,
    )
