"""The layer table against torch: names, shapes, parameters, buffers and FLOPs."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bigunet.errors import ShapeError
from bigunet.layers import count_parameters, layer_table
from bigunet.model import UNet, run_layers
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

SPECS = {
    "plain": UNetSpec(levels=3, channels=4),
    "flat": UNetSpec(levels=1, channels=4),
    "batch": UNetSpec(levels=4, channels=4, norm="batch", up="bilinear", convs=1),
    "group": UNetSpec(levels=3, channels=8, norm="group", up="nearest", activation="silu"),
    "instance": UNetSpec(levels=2, channels=3, norm="instance", growth=1.5, kernel=5),
    "no bias": UNetSpec(levels=3, channels=4, bias=False, head_bias=False, max_channels=6),
    "torchgpipe": UNetSpec.torchgpipe(3, 4, depth=3),
    "dropout": UNetSpec(levels=2, channels=4, dropout=0.2, convs=3),
    "block, transposed": UNetSpec(levels=3, channels=4, narrowing="block"),
}


@pytest.mark.parametrize("name", SPECS)
def test_rows_are_the_networks_layers(name):
    """Run the real network layer by layer: each row's shapes are those of its module."""
    spec = SPECS[name]
    net = UNet(spec)
    shape = (2, 3, 4 * spec.stride, 3 * spec.stride)
    table = layer_table(spec, shape)
    assert [row.name for row in table] == list(net.layers)
    x, skips = torch.randn(shape), {}
    for row in table:
        assert tuple(x.shape) == row.in_shape, row.name
        x = run_layers([row], net.layers, x, skips)
        assert tuple(x.shape) == row.out_shape, row.name
        module = net.layers[row.name]
        assert sum(p.numel() for p in module.parameters()) == row.parameters, row.name
        assert sum(b.numel() for b in module.buffers()) == row.buffers, row.name
    assert not skips
    assert count_parameters(spec) == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_convolution_flops_equal_torchs_counter(name):
    """torch counts convolutions without biases; so the biases are taken off here."""
    spec = SPECS[name].replace(bias=False, head_bias=False)
    net = UNet(spec).eval()
    shape = (1, 3, 4 * spec.stride, 4 * spec.stride)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.randn(shape))
    kinds = {"conv", "head"} | ({"up"} if spec.up == "transpose" else set())
    ours = sum(row.flops for row in layer_table(spec, shape) if row.kind in kinds)
    assert ours == counter.get_total_flops()


@pytest.mark.parametrize("up", ["transpose", "nearest", "bilinear"])
def test_rows_of_a_cropped_tile_are_what_the_decoder_runs(up):
    spec = UNetSpec(levels=4, channels=4, convs=1, up=up)
    net = UNet(spec)
    tile = tile_image((160, 160), 32, spec)[12]
    shape = (1, 3, *tile.read.shape)
    x, skips = torch.randn(shape), {}
    for row in layer_table(spec, shape, tile=tile):
        x = run_layers([row], net.layers, x, skips, tile)
        assert tuple(x.shape) == row.out_shape, row.name
    whole = sum(row.flops for row in layer_table(spec, shape))
    assert sum(row.flops for row in layer_table(spec, shape, tile=tile)) < whole


def test_published_parameter_counts():
    assert count_parameters(UNetSpec.torchgpipe(6, 72)) == 362_157_516
    assert len(layer_table(UNetSpec.torchgpipe(6, 72), (1, 3, 192, 192))) == 285
    # The 2015 network has 31,031,685 weights where the up-convolutions are 2 x 2 (one band, two
    # classes, biases); counted from the layer list of its Figure 1.
    widths = [1, 64, 128, 256, 512, 1024]
    figure = sum(9 * a * b + b + 9 * b * b + b for a, b in itertools.pairwise(widths))
    for low, high in itertools.pairwise(widths[1:]):
        figure += 4 * high * low + low + 9 * high * low + low + 9 * low * low + low
    figure += 2 * 64 + 2
    assert count_parameters(UNetSpec.ronneberger2015()) == figure


def test_sides_off_the_stride_are_padded_as_the_network_pads():
    spec = UNetSpec(levels=4, channels=4)
    assert layer_table(spec, (1, 3, 33, 40))[0].in_shape == (1, 3, 40, 40)


@pytest.mark.parametrize(
    "shape", [(0, 3, 64, 64), (1, 4, 64, 64), (1, 3, 7, 64), (1, 3, 2**31, 2**31), (1, 3, -8, 64)]
)
def test_shapes_that_cannot_be(shape):
    with pytest.raises(ShapeError):
        layer_table(UNetSpec(levels=4), shape)
    tile = tile_image((64, 64), 32, UNetSpec(levels=4))[0]
    with pytest.raises(ShapeError):
        layer_table(UNetSpec(levels=4), (1, 3, 16, 16), tile=tile)
