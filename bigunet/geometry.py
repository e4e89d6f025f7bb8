"""The exact reach of a U-Net, by interval arithmetic from the output back to the input.

A margin is the number of pixels, at one level's resolution and on each side of a tile's core,
that must be right for the core's output to be right. Going backwards, a convolution adds
`kernel // 2`; an up-sampling by 2 halves; a pooling doubles; at a skip the larger margin counts.

Where `2^(levels-1) > radius`, with transposed or nearest up-sampling, the result has the closed
form `(3 * 2^(levels-1) - 1) * radius`. The formula often quoted, with -2 in place of -1, comes
from "valid" output shapes (572 -> 388) and falls short of the true reach by one radius.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Margins",
    "Upsampling",
    "closed_form_halo",
    "margins",
    "padded_size",
    "upsampling_margin",
]

Upsampling = Literal["transpose", "nearest", "bilinear"]


@dataclass(frozen=True, slots=True)
class Margins:
    """Margins in pixels at each level's own resolution, level 0 first.

    `decoder_in[l]` and `decoder_out[l]` are those of the decoder's block at level l (of the
    lowest block at l = levels - 1, which has no decoder); `encoder_in` and `encoder_out` likewise.
    """

    encoder_in: tuple[int, ...]
    encoder_out: tuple[int, ...]
    decoder_in: tuple[int, ...]
    decoder_out: tuple[int, ...]

    @property
    def halo(self) -> int:
        """Reach into the image, in image pixels."""
        return self.encoder_in[0]


def upsampling_margin(margin: int, up: Upsampling) -> int:
    """Margin that an up-sampling by 2 needs below for `margin` above.

    Bilinear interpolation reads output pixel o at (o + 1/2)/2 - 1/2 and so needs the pixels on
    both sides of that point.
    """
    return margin // 2 + 1 if up == "bilinear" else -(-margin // 2)


def margins(levels: int, radius: int, up: Upsampling) -> Margins:
    """Margins of every level for one correct output pixel.

    `radius` is what one block's convolutions reach: convolutions times `kernel // 2`.
    """
    lowest = levels - 1
    decoder_out, decoder_in = [0], [radius]
    for _ in range(lowest):
        decoder_out.append(upsampling_margin(decoder_in[-1], up))
        decoder_in.append(decoder_out[-1] + radius)
    encoder_out = [0] * levels
    encoder_in = [0] * levels
    encoder_out[lowest], encoder_in[lowest] = decoder_out[lowest], decoder_in[lowest]
    for level in reversed(range(lowest)):
        encoder_out[level] = max(2 * encoder_in[level + 1], decoder_in[level])
        encoder_in[level] = encoder_out[level] + radius
    return Margins(tuple(encoder_in), tuple(encoder_out), tuple(decoder_in), tuple(decoder_out))


def closed_form_halo(levels: int, radius: int) -> int:
    """`(3 * 2^(levels-1) - 1) * radius`: exact where 2^(levels-1) > radius, else an upper bound.

    Holds for transposed and nearest up-sampling.
    """
    return ((3 << (levels - 1)) - 1) * radius


def padded_size(size: int, stride: int) -> int:
    """`size` rounded up to the stride: images are padded at the bottom and the right only."""
    return -(-size // stride) * stride
