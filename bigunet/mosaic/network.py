"""The network as the mosaic runs it: frozen, folded, fused, channels last.

`TileNetwork` copies a `UNet`'s weights once: batch norm goes into the convolution before it (exact
to rounding), convolution and activation become one operation on CPUs with oneDNN, weights are laid
out ahead of time. The model itself is neither changed nor moved. In bf16 the last 1 x 1
convolution stays in fp32, so that labels are not decided by eight bits of a logit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigunet.errors import SpecError, fail
from bigunet.layers import LayerRow
from bigunet.model import UNet
from bigunet.tiles import Tile

__all__ = ["MosaicPrecision", "TileNetwork", "cpu_has_bf16", "resolve_precision", "weights_hash"]

MosaicPrecision = Literal["auto", "fp32", "bf16", "fp64"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
#: oneDNN's post-operation: name, scalars, algorithm.
_FUSED: dict[str, tuple[str, list[float], str]] = {
    "relu": ("relu", [], ""),
    "leaky_relu": ("leaky_relu", [0.01], ""),
}
_CHANNELS_LAST = torch.channels_last
Step = Callable[[Tensor], Tensor]


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX-BF16 or AVX512-BF16; Linux on x86)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def resolve_precision(precision: str, device: torch.device, dtype: torch.dtype) -> str:
    """`"auto"` made definite: fp64 for a float64 model, bf16 where the hardware has it, or fp32.

    Raises
    ------
    SpecError : for any other word.
    """
    if precision != "auto":
        if precision not in _DTYPES:
            fail(
                SpecError,
                rule="precision is 'auto', 'fp32', 'bf16' or 'fp64'",
                got=repr(precision),
                remedy="Take 'auto'.",
            )
        return precision
    if dtype == torch.float64:
        return "fp64"
    fast = device.type == "cuda" or (device.type == "cpu" and cpu_has_bf16())
    return "bf16" if fast else "fp32"


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over names, dtypes and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class TileNetwork:
    """A frozen copy of `model` for inference on `device`; calls are safe from several threads.

    Parameters
    ----------
    precision : "fp32", "bf16" or "fp64".
    fused : whether to fuse convolution and activation where oneDNN can (CPU, fp32 and bf16).
    """

    def __init__(
        self,
        model: UNet,
        *,
        precision: str = "fp32",
        device: torch.device | str = "cpu",
        fused: bool = True,
    ) -> None:
        self.spec, self.precision = model.spec, precision
        self.device, self.dtype = torch.device(device), _DTYPES[precision]
        self.fused = (
            fused
            and self.device.type == "cpu"
            and self.dtype != torch.float64
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
        )
        self._model = model
        self._steps: list[tuple[LayerRow, Step]] = []
        rows = list(model.rows)
        while rows:
            row = rows.pop(0)
            if row.kind == "conv":
                self._unit(row, rows)
            elif row.kind == "head":
                self._head(row)
            elif row.kind == "pool" and self.device.type == "cpu":
                self._steps.append((row, _pool))
            elif row.kind in ("up", "pool", "norm", "activation"):
                self._steps.append((row, self._module(row)))
            elif row.kind in ("skip", "concat"):
                self._steps.append((row, lambda x: x))
        del self._model

    @torch.inference_mode()
    def logits(self, x_BCHW: Tensor, tile: Tile) -> Tensor:
        """Logits of `tile.write`, (batch, classes, height, width), from the pixels of `tile.read`.

        fp32 (fp64 where the network is), channels last, possibly a view.
        """
        x = x_BCHW.to(self.device, self.dtype, memory_format=_CHANNELS_LAST)
        skips: dict[str, Tensor] = {}
        for row, step in self._steps:
            match row.kind:
                case "skip":
                    skips[row.name] = x
                case "up":
                    crop = tile.crops[row.level]
                    x = step(x[(..., *crop.below.slices)])[(..., *crop.upsampled.slices)]
                case "concat":
                    assert row.source is not None
                    skip = skips.pop(row.source)[(..., *tile.crops[row.level].skip.slices)]
                    x = _join(skip, x)
                    del skip
                case _:
                    x = step(x)
        return x[(..., *tile.out.slices)]

    @torch.inference_mode()
    def answer(
        self, x_BCHW: Tensor, tile: Tile, probabilities: str | None = None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Labels uint8 (batch, height, width) and, on request, probabilities of this dtype.

        A network with one output has two labels, 1 where its logit is above 0, and one
        probability, the logistic function of the logit.
        """
        logits = self.logits(x_BCHW, tile)
        single = self.spec.classes == 1
        # The first of equal maxima, as argmax(1) takes it, which is slower over channels last.
        labels = logits[:, 0] > 0 if single else logits.max(1).indices
        chosen = labels.to(torch.uint8).cpu().numpy()
        if probabilities is None:
            return chosen, None
        shares = torch.sigmoid(logits) if single else torch.softmax(logits, 1)
        if probabilities == "uint8":
            shares = (shares * 255).round_().to(torch.uint8)
        else:
            shares = shares.to(getattr(torch, probabilities))
        return chosen, shares.contiguous().cpu().numpy()

    # Building the steps --------------------------------------------------------------------------

    def _module(self, row: LayerRow) -> Step:
        module: Any = copy.deepcopy(self._model.layers[row.name]).eval().requires_grad_(False)
        step: Step = module.to(self.device, self.dtype, memory_format=_CHANNELS_LAST)
        return step

    def _unit(self, row: LayerRow, rows: list[LayerRow]) -> None:
        """Convolution, dropout (nothing to do), norm, activation, as few operations as possible."""
        conv: Any = self._model.layers[row.name]
        weight, bias = conv.weight.detach().double(), conv.bias
        shift = None if bias is None else bias.detach().double()
        norm, activation = None, None
        while rows and rows[0].kind in ("dropout", "norm", "activation"):
            last = rows.pop(0)
            norm = last if last.kind == "norm" else norm
            activation = last if last.kind == "activation" else activation
        if norm is not None and self.spec.norm == "batch":
            weight, shift = _fold(weight, shift, self._model.layers[norm.name])
            norm = None
        post = None
        if self.fused and norm is None and activation is not None:
            post = _FUSED.get(self.spec.activation)
        self._steps.append((row, self._conv(weight, shift, self.dtype, post)))
        if norm is not None:
            self._steps.append((norm, self._module(norm)))
        if activation is not None and post is None:
            self._steps.append((activation, self._module(activation)))

    def _head(self, row: LayerRow) -> None:
        head: Any = self._model.layers[row.name]
        dtype = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        bias = None if head.bias is None else head.bias.detach().double()
        conv = self._conv(head.weight.detach().double(), bias, dtype, None)
        self._steps.append((row, lambda x: conv(x.to(dtype))))

    def _conv(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        post: tuple[str, list[float], str] | None,
    ) -> Step:
        pad = weight.shape[-1] // 2
        mode = "zeros" if pad == 0 else self.spec.padding_mode
        inner = pad if mode == "zeros" else 0
        w = weight.to(self.device, dtype).contiguous(memory_format=_CHANNELS_LAST)
        b = None if bias is None else bias.to(self.device, dtype)
        sides = [pad] * 4

        if not self.fused:

            def plain(x: Tensor) -> Tensor:
                if mode != "zeros":
                    x = F.pad(x, sides, mode=mode)
                return F.conv2d(x, w, b, padding=inner)

            return plain

        name, scalars, algorithm = post or ("none", [], "")
        packed: list[Tensor] = []

        def fused(x: Tensor) -> Tensor:
            if mode != "zeros":
                x = F.pad(x, sides, mode=mode)
            if not packed:  # two threads may both come here, with the same result
                packed.append(
                    torch.ops.mkldnn._reorder_convolution_weight(
                        w, [inner] * 2, [1, 1], [1, 1], 1, list(x.shape)
                    )
                )
            y: Tensor = torch.ops.mkldnn._convolution_pointwise(
                x, packed[0], b, [inner] * 2, [1, 1], [1, 1], 1, name, scalars, algorithm
            )
            return y

        return fused


def _join(skip_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
    """`torch.cat` along the channels of two cropped channels-last maps.

    For fp32 on CPUs, NumPy copies pairs of channels as one word, in two thirds of the time.
    """
    maps = (skip_BCHW, x_BCHW)
    if any(
        m.device.type != "cpu" or m.dtype != torch.float32 or m.stride(1) != 1 or m.shape[1] % 2
        for m in maps
    ):
        return torch.cat(maps, dim=1)
    words = [m.permute(0, 2, 3, 1).view(torch.float64).numpy() for m in maps]
    joined = torch.from_numpy(np.concatenate(words, axis=-1)).view(torch.float32)
    return joined.permute(0, 3, 1, 2)


def _pool(x_BCHW: Tensor) -> Tensor:
    """2 x 2 max-pooling of channels-last maps with even sides: rows first, then pairs of columns.

    Long vectors make it two to three times as fast as torch's own on CPUs.
    """
    rows = torch.maximum(x_BCHW[:, :, ::2], x_BCHW[:, :, 1::2]).permute(0, 2, 3, 1)
    batch, height, width, channels = rows.shape
    pairs = rows.reshape(batch * height * (width // 2), 2, channels)
    pooled = torch.maximum(pairs[:, 0], pairs[:, 1])
    return pooled.view(batch, height, width // 2, channels).permute(0, 3, 1, 2)


def _fold(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Batch norm with its running statistics as part of the convolution, in float64."""
    mean, var = norm.running_mean.double(), norm.running_var.double()
    scale = torch.rsqrt(var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale if bias is None else (bias - mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return weight * scale[:, None, None, None], shift
