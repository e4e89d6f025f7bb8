"""`bigunet info` and `bigunet halo`: what a network is, and how far it sees."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, emit, table
from bigunet.layers import count_parameters, layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

__all__ = ["halo", "info"]


@with_spec(UNetSpec)
def halo(
    spec: UNetSpec,
    core: Annotated[int | None, typer.Option("--core", help="Side of a tile's core.")] = None,
    json: Json = False,
) -> None:
    """Print the halo that makes tiles exact, and what it costs at a tile size."""
    side = core or max(256, spec.stride)
    full, cropped = (_redundancy(spec, side, crop) for crop in (False, True))
    margins = spec.margins
    values: dict[str, Any] = {
        "halo": spec.halo,
        "stride": spec.stride,
        "halo_aligned": spec.halo_aligned,
        "tile_exact": spec.tile_exact,
        "margins": {
            "encoder_in": margins.encoder_in,
            "encoder_out": margins.encoder_out,
            "decoder_in": margins.decoder_in,
            "decoder_out": margins.decoder_out,
        },
        "core": side,
        "read": side + 2 * spec.halo_aligned,
        "flops_ratio": full,
        "flops_ratio_cropped": cropped,
    }
    lines = [
        f"halo          {spec.halo} pixels on each side",
        f"stride        {spec.stride} pixels",
        f"halo_aligned  {spec.halo_aligned} pixels, what a tile reads around its core",
        f"tile_exact    {'yes' if spec.tile_exact else f'no: norm {spec.norm!r} sees the extent'}",
        f"work of a {side} x {side} core: {full:.2f} times the whole image's share, "
        f"{cropped:.2f} with the cropped decoder",
        "",
        *table(
            ("level", "encoder in", "encoder out", "decoder in", "decoder out"),
            zip(
                range(spec.levels),
                margins.encoder_in,
                margins.encoder_out,
                margins.decoder_in,
                margins.decoder_out,
                strict=True,
            ),
        ),
    ]
    emit(values, lines, json)


def _redundancy(spec: UNetSpec, side: int, cropped: bool) -> float:
    """FLOPs of an inner tile over those of the same pixels in a whole image."""
    reach = -(-spec.halo_aligned // side)
    image = (2 * reach + 1) * side
    tiles = tile_image((image, image), side, spec, cropped=cropped)
    inner = tiles[len(tiles) // 2]
    read = (1, spec.in_channels, *inner.read.shape)
    work = sum(row.flops for row in layer_table(spec, read, tile=inner))
    share = sum(row.flops for row in layer_table(spec, (1, spec.in_channels, side, side)))
    return work / share


@with_spec(UNetSpec)
def info(
    spec: UNetSpec,
    height: Annotated[int, typer.Option(help="Height of the image in pixels.")] = 1024,
    width: Annotated[int, typer.Option(help="Width of the image in pixels.")] = 1024,
    image_batch: Annotated[int, typer.Option(help="Images in the batch.")] = 1,
    json: Json = False,
) -> None:
    """Print the layer table: shapes, parameters and FLOPs of every layer."""
    rows = layer_table(spec, (image_batch, spec.in_channels, height, width))
    flops = sum(row.flops for row in rows)
    values = {
        "spec": spec.to_dict(),
        "parameters": count_parameters(spec),
        "forward_flops": flops,
        "layers": [row._asdict() for row in rows],
    }
    lines = [
        *table(
            ("layer", "kind", "output shape", "parameters", "MFLOP"),
            (
                (
                    r.name,
                    r.kind,
                    " x ".join(map(str, r.out_shape)),
                    r.parameters,
                    round(r.flops / 1e6),
                )
                for r in rows
            ),
        ),
        "",
        f"{values['parameters']:,} parameters, {flops / 1e9:,.1f} GFLOP, {len(rows)} layers",
    ]
    emit(values, lines, json)
