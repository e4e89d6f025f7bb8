"""The frozen network: what it computes, in which precision, and that it leaves the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bigunet import UNetSpec, tile_image, whole_image
from bigunet.errors import SpecError
from bigunet.model import UNet
from bigunet.mosaic import TileNetwork, cpu_has_bf16, weights_hash
from bigunet.mosaic.network import _join, _pool, resolve_precision

SPEC = UNetSpec(levels=3, channels=8, classes=3, norm="batch", bias=True)
CPU = torch.device("cpu")


def model(spec: UNetSpec = SPEC) -> UNet:
    torch.manual_seed(0)
    net = UNet(spec)
    with torch.no_grad():
        for _ in range(10):
            net(torch.randn(1, spec.in_channels, 64, 64))
        net.eval()
        net.layers["head"].weight /= net(torch.randn(1, spec.in_channels, 64, 64)).std()
    return net


@pytest.mark.parametrize("fused", [True, False])
def test_folded_and_fused_layers_compute_the_same(fused: bool) -> None:
    net = model()
    x = torch.randn(1, 3, 96, 80)
    tile = whole_image((96, 80), SPEC)
    found = TileNetwork(net, fused=fused).logits(x, tile)
    with torch.inference_mode():
        torch.testing.assert_close(found, net(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("channels", [6, 7])
def test_joining_and_pooling_are_torchs(channels: int) -> None:
    whole = torch.randn(2, channels, 26, 30).contiguous(memory_format=torch.channels_last)
    other = torch.randn(2, 4, 20, 24).contiguous(memory_format=torch.channels_last)
    for dtype in (torch.float32, torch.bfloat16):
        skip, x = whole.to(dtype)[..., 3:15, 5:21], other.to(dtype)[..., 1:13, 2:18]
        joined = _join(skip, x)
        assert torch.equal(joined, torch.cat((skip, x), 1))
        assert joined.is_contiguous(memory_format=torch.channels_last)
        pooled = _pool(joined)
        assert torch.equal(pooled, F.max_pool2d(joined, 2))
        assert pooled.is_contiguous(memory_format=torch.channels_last)


def test_folding_is_exact_in_float64() -> None:
    net = model().double()
    x = torch.randn(1, 3, 96, 80, dtype=torch.float64)
    tile = whole_image((96, 80), SPEC)
    found = TileNetwork(net, precision="fp64").logits(x, tile)
    with torch.inference_mode():
        torch.testing.assert_close(found, net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["none", "batch", "group", "instance"])
def test_one_operation_a_unit_where_it_can_be(norm: Any) -> None:
    network = TileNetwork(model(SPEC.replace(norm=norm)))
    kinds = [row.kind for row, _ in network._steps]
    units = SPEC.convs * (2 * SPEC.levels - 1)
    assert kinds.count("conv") == units
    kept = norm in ("group", "instance")
    assert kinds.count("norm") == (units if kept else 0)
    assert kinds.count("activation") == (units if kept or not network.fused else 0)


def test_bf16_ends_in_fp32_and_stays_close() -> None:
    net = model()
    x = torch.randn(1, 3, 96, 80)
    tile = tile_image((96, 80), (48, 40), SPEC)[0]
    x = x[(..., *tile.read.slices)]
    found = TileNetwork(net, precision="bf16").logits(x, tile)
    exact = TileNetwork(net, precision="fp32").logits(x, tile)
    assert found.dtype == torch.float32
    # Not rounded to 8 bits: nearly all values differ from their own bf16 rounding.
    assert (found != found.bfloat16().float()).float().mean() > 0.9
    assert 1e-5 < (found - exact).abs().mean() < 0.05


def test_probabilities_are_softmax_of_the_logits() -> None:
    network = TileNetwork(model())
    x, tile = torch.randn(2, 3, 32, 32), whole_image((32, 32), SPEC)
    labels, shares = network.answer(x, tile, "float32")
    logits = network.logits(x, tile)
    assert shares is not None
    torch.testing.assert_close(torch.from_numpy(shares), F.softmax(logits, 1).contiguous())
    assert (labels == logits.argmax(1).numpy()).all()


def test_auto_takes_what_the_hardware_multiplies() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    has = bool(flags & {"amx_bf16", "avx512_bf16"})
    assert cpu_has_bf16() is has
    assert resolve_precision("auto", CPU, torch.float32) == ("bf16" if has else "fp32")
    assert resolve_precision("auto", torch.device("cuda"), torch.float32) == "bf16"
    assert resolve_precision("auto", CPU, torch.float64) == "fp64"
    assert resolve_precision("fp32", CPU, torch.float64) == "fp32"
    with pytest.raises(SpecError, match="precision is 'auto'"):
        resolve_precision("half", CPU, torch.float32)


def test_the_hash_sees_every_bit() -> None:
    net = model()
    before = weights_hash(net)
    assert before == weights_hash(model())
    with torch.no_grad():
        bias = net.layers["head"].bias
        bias[0] = torch.nextafter(bias[0], torch.tensor(9.0))
    assert weights_hash(net) != before
