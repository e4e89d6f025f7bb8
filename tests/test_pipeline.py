"""Every engine against the plain network: output, loss and each named gradient, in float64."""

from __future__ import annotations

import pytest
from pipeline_ranks import SPECS, cases, network, on_ranks, one, plan_of, timeline_plan

from bigunet.model import UNet
from bigunet.schedule import actions

TOLERANCE = 1e-10


def all_names(name: str) -> set[str]:
    return {n for n, _ in network(SPECS[name]).named_parameters()}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_reference_equals_the_plain_network(stages: int) -> None:
    for name, arguments in cases(stages):
        worst, names = one(plan_of(name, **arguments), name, "reference")
        assert names == all_names(name)
        assert worst <= TOLERANCE, (name, arguments)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_fairscale_equals_the_plain_network(stages: int) -> None:
    for name, arguments in list(cases(stages))[::2]:
        placements = ["straight", "folded"] if stages % 2 == 0 else ["straight"]
        for placement in placements:
            plan = plan_of(name, placement=placement, **{**arguments, "schedule": "gpipe"})
            worst, names = one(plan, name, "fairscale_pipe")
            assert names == all_names(name)
            assert worst <= TOLERANCE, (name, arguments, placement)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_distributed_equals_the_plain_network(stages: int) -> None:
    """GPipe and 1F1B, 2 stages cut at every layer, with every kind of recomputation."""
    results = on_ranks(stages)["cases"]
    assert len(results) == len(list(cases(stages)))
    for case, worst, compared in results:
        assert compared == len(all_names(case.split()[0])), case
        assert worst <= TOLERANCE, case


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_measured_timelines_obey_the_schedule(stages: int) -> None:
    """Each rank did what the plan's list says, in its order, and nothing before its inputs."""
    plan, table = timeline_plan(stages), on_ranks(stages)["timeline"]
    names = ("device", "stage", "micro_batch", "kind", "start", "end")
    rows = list(zip(*(table[name].values.tolist() for name in names), strict=True))
    ends = {(kind, stage, mb): end for _, stage, mb, kind, _, end in rows}
    for device, line in enumerate(actions(plan)):
        wanted = [
            (a.kind, a.stage, a.micro_batch) for a in line if a.kind in ("forward", "backward")
        ]
        if plan.schedule == "gpipe":  # torch's goes back in the order of the forward passes
            wanted[plan.micro_batches :] = wanted[: plan.micro_batches - 1 : -1]
        assert [(k, s, m) for d, s, m, k, _, _ in rows if d == device] == wanted
    for _, stage, mb, kind, start, end in rows:
        assert 0 <= start < end <= table.attrs["step_seconds"]
        before = (kind, stage - 1, mb) if kind == "forward" else (kind, stage + 1, mb)
        assert ends.get(before, 0.0) <= start
    assert 0 < table.attrs["bubble"] < 1


def test_cuts_cover_encoder_bottleneck_and_decoder() -> None:
    rows = UNet(SPECS["plain"]).rows
    blocks = {rows[a["cuts"][0]].block for n, a in cases(2) if n == "plain"}
    assert {"enc0", "enc1", "mid", "dec1", "dec0", "head"} <= blocks
