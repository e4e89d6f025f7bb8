"""The interval arithmetic against brute force over explicit index sets."""

from itertools import product

import pytest

from bigunet.geometry import closed_form_halo, margins, padded_size, upsampling_margin

UPS = ("transpose", "nearest", "bilinear")


def _sources(index: int, up: str) -> set[int]:
    """Input pixels that output pixel `index` of an up-sampling by 2 reads."""
    if up != "bilinear":
        return {index // 2}
    # Centre of the output pixel in the input's pixel coordinates, in quarters: (2 * index - 1) / 4.
    low = (2 * index - 1) // 4
    return {low, low + 1}


def _reach(levels: int, convs: int, half: int, up: str, pixel: int) -> set[int]:
    """Input pixels that output pixel `pixel` depends on, one axis, unbounded image."""

    def through_convs(pixels: set[int]) -> set[int]:
        for _ in range(convs):
            pixels = {p + d for p in pixels for d in range(-half, half + 1)}
        return pixels

    need, skips = {pixel}, []
    for _ in range(levels - 1):
        need = through_convs(need)
        skips.append(need)
        need = set().union(*(_sources(p, up) for p in need))
    need = through_convs(need)
    while skips:
        need = {2 * p + d for p in need for d in (0, 1)} | skips.pop()
        need = through_convs(need)
    return need


@pytest.mark.parametrize("up", UPS)
@pytest.mark.parametrize(
    ("levels", "convs", "half"), list(product((1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2)))
)
def test_halo_equals_brute_force(levels, convs, half, up):
    """The widest reach over all positions on the pooling lattice is the halo, on both sides."""
    stride = 2 ** (levels - 1)
    halo = margins(levels, convs * half, up).halo
    left = max(0 - min(_reach(levels, convs, half, up, p)) for p in range(stride))
    right = max(max(_reach(levels, convs, half, up, p)) - (stride - 1) for p in range(stride))
    assert (left, right) == (halo, halo)


@pytest.mark.parametrize(("levels", "radius"), list(product(range(1, 9), range(1, 7))))
def test_closed_form_is_exact_where_it_says_so_and_a_bound_elsewhere(levels, radius):
    for up in ("transpose", "nearest"):
        halo = margins(levels, radius, up).halo
        if 2 ** (levels - 1) > radius:
            assert halo == closed_form_halo(levels, radius)
        assert halo <= closed_form_halo(levels, radius)


def test_known_values():
    assert margins(5, 2, "transpose").halo == 94
    assert margins(5, 2, "transpose").decoder_out == (0, 1, 2, 2, 2)
    assert margins(3, 2, "transpose").halo == 22
    assert margins(3, 2, "bilinear").halo == 26
    assert margins(2, 1, "nearest").halo == 5
    assert margins(1, 2, "nearest").halo == 2


@pytest.mark.parametrize("up", UPS)
def test_upsampling_margin_equals_brute_force(up):
    for margin in range(20):
        sources = set().union(*(_sources(p, up) for p in range(-margin, 2 + margin)))
        assert upsampling_margin(margin, up) == -min(sources) == max(sources)


def test_padded_size():
    assert [padded_size(n, 8) for n in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 24]
