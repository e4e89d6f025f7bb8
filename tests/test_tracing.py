"""The predicted memory against what autograd keeps and against a step under fake tensors."""

from __future__ import annotations

import statistics

import pytest
import torch
from memory_cases import cases

from bigunet.memory import memory
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tracing import StepRunner, saved_bytes, trace_peak

KEPT = ["activations", "skips", "casts"]


@pytest.mark.parametrize("seed", range(8))
def test_what_autograd_keeps_is_predicted_to_the_byte(seed: int) -> None:
    """80 networks, tiles, precisions and ways to recompute: each storage once, by hooks."""
    for case in cases(seed, 10):
        table = memory(case.spec, case.shape, case.train, together=True, **case.how)
        predicted = int(table.held.sel(cause=KEPT).sum())
        runner = StepRunner(case.spec, case.shape, case.train, **case.how)
        assert predicted == saved_bytes(runner), case


@pytest.mark.parametrize("seed", range(8, 16))
def test_predicted_peak_meets_the_traced_one(seed: int) -> None:
    """64 configurations; in nearly all of them the difference is the loss's own few bytes."""
    errors = []
    for case in cases(seed, 8):
        table = memory(case.spec, case.shape, case.train, together=True, fake=True, **case.how)
        traced = trace_peak(case.spec, case.shape, case.train, **case.how)["total"]
        errors.append(abs(int(table.peak[0]) / traced - 1))
        assert errors[-1] <= 0.01, case
    assert statistics.median(errors) <= 0.001


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16"])
def test_the_state_between_steps_is_predicted_to_the_byte(optimiser: str, precision: str) -> None:
    train = TrainSpec(optimiser=optimiser, precision=precision)  # type: ignore[arg-type]
    for spec in (
        UNetSpec(levels=3, convs=2, channels=8, norm="batch"),
        UNetSpec(levels=2, convs=1, channels=8, norm="group", up="nearest", bias=False),
        UNetSpec.torchgpipe(1, 4),
    ):
        shape = (1, 3, 64, 64)
        runner = StepRunner(spec, shape, train)
        runner.step()
        state = [
            value
            for values in runner.optimiser.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        found = {
            "parameters": list(runner.model.parameters()),
            "gradients": [p.grad for p in runner.model.parameters()],
            "buffers": list(runner.model.buffers()),
            "optimiser": state,
            "input": [runner.x, runner.y],
        }
        held = memory(spec, shape, train).held.sum("layer")
        for cause, tensors in found.items():
            nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
            assert int(held.sel(cause=cause)) == nbytes, cause


def test_parameters_of_the_presets_are_those_of_the_real_network_layer_by_layer() -> None:
    from torch._subclasses import FakeTensorMode

    from bigunet.model import UNet

    for spec in (UNetSpec.torchgpipe(6, 72), UNetSpec.ronneberger2015(), UNetSpec()):
        with FakeTensorMode():
            model = UNet(spec)
        table = memory(spec, (1, spec.in_channels, 64, 64), TrainSpec())
        for name, nbytes in zip(
            table.layer.values, table.held.sel(cause="parameters").values, strict=True
        ):
            real = sum(p.numel() * 4 for p in model.layers[str(name)].parameters())
            assert nbytes == real, name


def test_a_pretended_cuda_rounds_up_and_updates_all_parameters_at_once() -> None:
    spec, shape, train = UNetSpec(levels=3, channels=8), (2, 3, 48, 48), TrainSpec()
    traced = trace_peak(spec, shape, train, cuda=True)["total"]
    predicted = int(memory(spec, shape, train, device="A100-40GB", fake=True).peak[0])
    # The tracker sees CPU tensors and rounds nothing: 512 bytes a tensor at most.
    assert abs(predicted / traced - 1) < 0.05
