"""The learning rate's schedule, and the optimisers against torch's with the same settings."""

from __future__ import annotations

import math

import pytest
import torch

from bigunet.model import UNet
from bigunet.optimisers import learning_rate, optimiser
from bigunet.spec import TrainSpec, UNetSpec


def test_rate_rises_then_falls_as_a_cosine() -> None:
    train = TrainSpec(steps=101, warmup_steps=10, learning_rate=2.0, final_rate=0.1)
    rates = [learning_rate(train, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert rates[100] == pytest.approx(0.2)
    assert learning_rate(TrainSpec(steps=1, learning_rate=3.0), 0) == 3.0
    assert learning_rate(TrainSpec(steps=2, warmup_steps=2, learning_rate=3.0), 1) == 3.0


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_settings_reach_torch(name: str) -> None:
    train = TrainSpec(
        optimiser=name,  # type: ignore[arg-type]
        learning_rate=0.03,
        momentum=0.7,
        beta2=0.95,
        weight_decay=0.2,
    )
    torch.manual_seed(0)
    model, twin = (UNet(UNetSpec(levels=1, channels=2)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    wide = [p for p in twin.parameters() if p.ndim > 1]
    flat = [p for p in twin.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": 0.2}, {"params": flat, "weight_decay": 0.0}]
    reference = {
        "sgd": lambda: torch.optim.SGD(groups, 0.03),
        "momentum": lambda: torch.optim.SGD(groups, 0.03, momentum=0.7),
        "adam": lambda: torch.optim.Adam(groups, 0.03, (0.9, 0.95)),
        "adamw": lambda: torch.optim.AdamW(groups, 0.03, (0.9, 0.95)),
    }[name]()
    ours = optimiser(model, train)
    for step in range(3):
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.full_like(one, 0.1 * (step + 1))
            two.grad = one.grad.clone()
        ours.step()
        reference.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two)
