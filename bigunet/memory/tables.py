"""Plain tables, ready for JSON, of what the command line and notebooks show."""

from __future__ import annotations

from typing import Any

import xarray as xr

from bigunet.errors import MemoryBudgetError
from bigunet.layers import Shape
from bigunet.machines import Device
from bigunet.memory.solve import budget_bytes, deepest, largest_batch, largest_tile
from bigunet.memory.why_not import Diagnosis, why_not
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["diagnosis_table", "fit_table", "memory_table"]


def memory_table(table: xr.Dataset, *, layers: bool = False) -> dict[str, Any]:
    """`memory`'s Dataset as plain numbers: peaks, causes at the peak, and layers on request."""
    causes = [str(name) for name in table.cause.values]
    stages = []
    for k, peak in enumerate(table.peak.values.tolist()):
        moment = int(table.peak_moment[k])
        stages.append(
            {
                "peak_bytes": peak,
                "phase": str(table.phase.values[int(table.moment_phase[moment])]),
                "layer": str(table.layer.values[int(table.moment_layer[moment])]),
                "causes": dict(zip(causes, table.at_peak.values[k].tolist(), strict=True)),
            }
        )
    found: dict[str, Any] = {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in table.attrs.items()},
        "peak_bytes": max(stage["peak_bytes"] for stage in stages),
        "stages": stages,
    }
    if "capacity_bytes" in found:
        found["used_percent"] = 100 * found["peak_bytes"] / found["capacity_bytes"]
    if layers:
        held = table.held.values.tolist()
        found["layers"] = [
            {"name": str(name), **dict(zip(causes, row, strict=True))}
            for name, row in zip(table.layer.values, held, strict=True)
        ]
    return found


def fit_table(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    budget: int | str | Device,
    *,
    tile: Tile | None = None,
) -> dict[str, Any]:
    """Largest tile, largest batch and most levels within a budget; None where nothing fits."""

    def attempt(run: Any) -> dict[str, Any] | None:
        try:
            return dict(run()._asdict())
        except MemoryBudgetError:
            return None

    return {
        "budget_bytes": budget_bytes(budget),
        "largest_tile": attempt(lambda: largest_tile(spec, train, budget)),
        "largest_batch": attempt(lambda: largest_batch(spec, shape_BCHW, train, budget, tile=tile)),
        "deepest": attempt(lambda: deepest(spec, shape_BCHW, train, budget)),
        "diagnosis": diagnosis_table(why_not(spec, shape_BCHW, train, budget, tile=tile)),
    }


def diagnosis_table(found: Diagnosis) -> dict[str, Any]:
    """`why_not`'s answer as plain values."""
    return {
        "peak_bytes": found.peak,
        "budget_bytes": found.budget,
        "fits": found.fits,
        "phase": found.phase,
        "layer": found.layer,
        "causes": [{"cause": c.name, "bytes": c.nbytes, "share": c.share} for c in found.causes],
        "remedies": [
            {
                "remedy": r.name,
                "change": r.change,
                "peak_bytes": r.peak,
                "saved_bytes": r.saved,
                "time_factor": r.time_factor,
                "fits": r.fits,
            }
            for r in found.remedies
        ],
    }
