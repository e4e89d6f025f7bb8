"""The network, tile by tile, against itself on the whole image, in float64."""

from itertools import product

import pytest
import torch

from bigunet.errors import ShapeError
from bigunet.model import UNet, pad_to_stride
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

UPS = ("transpose", "nearest", "bilinear")
PADDINGS = ("zeros", "reflect", "replicate")


def network(spec: UNetSpec, *, positive: bool = False) -> UNet:
    """A network in float64 with random statistics; `positive` lets every path be seen.

    With weights above zero, no bias and statistics without shift, an input of zeros gives zeros,
    and an input pixel within reach gives more than zero.
    """
    torch.manual_seed(0)
    net = UNet(spec).double().eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2.0)
            if not positive:
                module.running_mean.normal_()
    if positive:
        for parameter in net.parameters():
            parameter.data.abs_()
    return net


def tiled(net, x, weights, core, halo=None, cropped=True):
    """Output put together from tiles; gradients of `sum(output * weights)` pile up in `net`."""
    padded = pad_to_stride(x, net.spec.stride)
    out = torch.full_like(weights, torch.nan)
    for tile in tile_image(x.shape[-2:], core, net.spec, halo=halo, cropped=cropped):
        part = net.forward_tile(padded[(..., *tile.read.slices)], tile)
        (part * weights[(..., *tile.write.slices)]).sum().backward()
        out[(..., *tile.write.slices)] = part.detach()
    return out


def gradients(net):
    named = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return named


def case(levels, convs, kernel, up, padding, norm):
    """Spec, image shape and core: one side longer than twice the halo, sizes off the stride."""
    spec = UNetSpec(
        levels=levels,
        convs=convs,
        kernel=kernel,
        up=up,
        padding_mode=padding,
        norm=norm,
        channels=2,
        growth=1.25,
        activation="leaky_relu",
        bias=norm == "none",
    )
    stride = spec.stride
    # Three tiles along the long side, the middle one with a full halo on both sides.
    core = max(stride, -(-spec.halo // stride) * stride)
    narrow = max(1, 8 // stride) * stride
    shape = (2 * core + stride // 2 + 3, 2 * narrow + narrow // 2 + 1)
    core = (core, narrow)
    if convs % 2:
        shape, core = shape[::-1], core[::-1]
    return spec, shape, core


CASES = list(product((2, 3, 4, 5), (1, 2, 3), (3, 5), UPS, PADDINGS, ("none", "batch")))


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
@pytest.mark.parametrize("up", UPS)
def test_tiles_equal_the_whole_image(levels, up):
    """Output within 1e-12, every named gradient within 1e-10, relative to the largest value."""
    for args in CASES:
        if (args[0], args[3]) != (levels, up):
            continue
        spec, shape, core = case(*args)
        net = network(spec)
        x = torch.randn(1, 3, *shape, dtype=torch.float64)
        weights = torch.randn(1, spec.classes, *shape, dtype=torch.float64)
        whole = net(x)
        (whole * weights).sum().backward()
        expected = gradients(net)
        whole = whole.detach()
        out = tiled(net, x, weights, core)
        assert (out - whole).abs().max() <= 1e-12 * whole.abs().max(), args
        for name, gradient in gradients(net).items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error <= 1e-10, (args, name)


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
@pytest.mark.parametrize("up", UPS)
def test_a_halo_one_stride_smaller_differs(levels, up):
    """With pixels set only beyond the smaller halo, its tiles see nothing, the whole image does.

    So even the faintest path counts, which random images would drown in rounding.
    """
    for args in CASES:
        if (args[0], args[3]) != (levels, up) or args[4] != "zeros":
            continue
        spec, shape, core = case(*args)
        spec = spec.replace(bias=False, head_bias=False)
        net = network(spec, positive=True)
        axis = 2 if shape[0] > shape[1] else 3
        halo = spec.halo_aligned - spec.stride
        x = torch.ones(1, 3, *shape, dtype=torch.float64)
        # The first tile answers for rows below core; the smaller halo shows it core + halo of them.
        x.narrow(axis, 0, core[axis - 2] + halo).zero_()
        weights = torch.zeros(1, spec.classes, *shape, dtype=torch.float64)
        weights.narrow(axis, 0, core[axis - 2]).fill_(1.0)
        whole = net(x)
        (whole * weights).sum().backward()
        seen = (whole.detach() * weights).max()
        assert seen > 0, args
        expected = gradients(net)
        assert ((tiled(net, x, weights, core) - whole) * weights).abs().max() <= 1e-12 * seen
        gradients(net)
        blind = tiled(net, x, weights, core, halo=halo) * weights
        assert blind.abs().max() == 0, args
        short = gradients(net)
        first = "layers.enc0_conv0.weight"
        assert expected[first].norm() > 0
        assert short[first].norm() == 0, args


@pytest.mark.parametrize("up", UPS)
def test_cropping_the_decoder_changes_nothing(up):
    spec = UNetSpec(levels=4, channels=4, up=up)
    net = network(spec)
    x = torch.randn(2, 3, 200, 150, dtype=torch.float64)
    weights = torch.ones(2, 2, 200, 150, dtype=torch.float64)
    out, full = (tiled(net, x, weights, 64, cropped=c) for c in (True, False))
    assert (out - full).abs().max() <= 1e-12


def test_the_network_compiles_whole_and_in_tiles():
    spec = UNetSpec(levels=3, channels=4, convs=1)
    net = UNet(spec).eval()
    x = torch.randn(1, 3, 64, 64)
    tile = tile_image((64, 64), 32, spec)[0]
    with torch.no_grad():
        whole = torch.compile(net, fullgraph=True)(x)
        part = torch.compile(net.forward_tile, fullgraph=True)(x[(..., *tile.read.slices)], tile)
        assert torch.allclose(whole, net(x), atol=1e-5)
        assert torch.allclose(part, net(x)[..., :32, :32], atol=1e-5)


def test_odd_sizes_keep_their_size_and_bad_inputs_are_refused():
    net = UNet(UNetSpec(levels=4, channels=2))
    assert net(torch.zeros(1, 3, 33, 41)).shape == (1, 2, 33, 41)
    with pytest.raises(ShapeError, match="stride"):
        net(torch.zeros(1, 3, 7, 41))
    with pytest.raises(ShapeError, match="3 bands"):
        net(torch.zeros(1, 13, 32, 32))
    tile = tile_image((64, 64), 32, net.spec)[0]
    with pytest.raises(ShapeError, match="read box"):
        net.forward_tile(torch.zeros(1, 3, 8, 8), tile)


def test_the_same_seed_gives_the_same_network():
    nets = []
    for _ in range(2):
        torch.manual_seed(7)
        nets.append(UNet(UNetSpec(levels=3, channels=4)).state_dict())
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
