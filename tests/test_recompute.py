"""Recomputation changes memory, never a result."""

from __future__ import annotations

import pytest
import torch

from bigunet.errors import PlanError
from bigunet.model import UNet
from bigunet.recompute import run_recomputed
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

SPECS = {
    "plain": UNetSpec(levels=3, convs=2, channels=4),
    "leaky in place": UNetSpec(
        levels=3, convs=2, channels=4, activation="leaky_relu", norm="batch"
    ),
    "dropout": UNetSpec(levels=2, convs=2, channels=4, dropout=0.3, norm="instance", inplace=False),
}


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_every_mode_equals_the_plain_run_bit_for_bit(name: str, tiled: bool) -> None:
    spec = SPECS[name]
    model = UNet(spec)
    tile = tile_image((48, 48), 8, spec)[7] if tiled else None
    x = torch.randn(2, 3, *(tile.read.shape if tile else (21, 26)))
    layers = len(model.rows)
    runs = [("none", None), ("block", None), ("stage", None), ("except_last", None)]
    # The third cut puts an activation that works in place first in its stage.
    last = next(i for i, row in enumerate(model.rows) if row.kind == "activation")
    stages = [(5, layers - 5), (1, 1, layers - 2), (last, layers - last)]
    runs += [("stage", sizes) for sizes in stages]
    results = []
    for mode, sizes in runs:
        torch.manual_seed(5)
        model.zero_grad()
        out = run_recomputed(model, x, tile, mode, stages=sizes)  # type: ignore[arg-type]
        out.square().mean().backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
    out, gradients = results[0]
    for other, theirs in results[1:]:
        assert torch.equal(other, out)
        for parameter, gradient in gradients.items():
            assert torch.equal(theirs[parameter], gradient), parameter


def test_except_last_recomputes_all_but_the_last_micro_batch() -> None:
    model = UNet(SPECS["plain"])
    x = torch.randn(1, 3, 16, 16)
    kept = {}
    for last in (False, True):
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: (seen.append(1), t)[1], lambda t: t
        ):
            run_recomputed(model, x, None, "except_last", last=last)
        kept[last] = len(seen)
    assert kept[False] < 5 < kept[True]


def test_stages_must_add_up() -> None:
    with pytest.raises(PlanError, match="layer each"):
        run_recomputed(
            UNet(SPECS["plain"]), torch.randn(1, 3, 16, 16), None, "stage", stages=(3, 4)
        )
