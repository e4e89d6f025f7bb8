"""Tiles in, an exact mosaic out: the one function that ties this package together."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
import zarr
from tqdm.auto import tqdm

from bigunet.errors import MemoryBudgetError, OutputError, fail
from bigunet.mosaic.budget import available_bytes
from bigunet.mosaic.compute import probe, results
from bigunet.mosaic.geotiff import probabilities_path, write_labels, write_probabilities
from bigunet.mosaic.network import TileNetwork
from bigunet.mosaic.open import open_mosaic, read_attrs
from bigunet.mosaic.pyramid import IGNORE
from bigunet.mosaic.run import Array, Asked, Run
from bigunet.mosaic.settings import as_network, as_scene, check_exactness, check_output
from bigunet.mosaic.store import WorkStore, disk_errors
from bigunet.scenes import ClassTable, Normalise

__all__ = ["InexactWarning", "segment"]


class InexactWarning(UserWarning):
    """A mosaic that was asked to differ from the whole image's result."""


def segment(
    model: Any,
    scene: xr.DataArray | Array | str | Path,
    *,
    tile: int | tuple[int, int] | None = None,
    out: str | Path | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto",
    halo: int | None = None,
    exact: bool = True,
    probabilities: bool | Literal["float16", "float32", "uint8"] = False,
    batch: int | None = None,
    normalise: Normalise | None = None,
    classes: ClassTable | None = None,
    memory_bytes: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    progress: bool = True,
) -> xr.Dataset:
    """Segment a scene of any size tile by tile, with the whole image's result.

    Parameters
    ----------
    model : a `UNet`, or weights with `.model`, `.normalise` and `.classes`. It is read, not
        changed; batch norm acts with its running statistics.
    scene : path, or (band, y, x) array, read lazily.
    tile : side, or (height, width), of the tile cores in pixels, multiples of the stride; chosen
        from the memory at hand where None.
    out : a new `.zarr` or `.tif`; None keeps the result in memory.
    precision : "auto" takes bf16 where the device multiplies it in hardware, else fp32.
    halo : pixels read around a tile; the exact `spec.halo_aligned` by default. A smaller one is
        compared with it on a few tiles: the differences go to the attributes and to a warning.
    exact : False accepts a norm that depends on the extent that it sees.
    probabilities : also give class probabilities, float16 by default; "uint8" is times 255.
    batch : tiles computed as one batch; 1 on CPUs and as many as make a megapixel on GPUs.
    normalise, classes : instead of the model's own.
    memory_bytes : for the tiles being computed; half of what is available by default.
    overwrite : replace a finished mosaic, or drop an unfinished one, of another run. The old one
        stays until the new one is complete.
    resume : continue an unfinished mosaic of the same run, found as `<out>.partial`; the result's
        bytes are those of an uninterrupted run. False starts anew.
    progress : show a bar.

    Returns
    -------
    Dataset with `labels` uint8 (y, x), 255 where the scene has no data, and, where asked for,
    `probabilities` (class, y, x); attributes say how it was made. A Zarr mosaic has a pyramid of
    majority votes: see `open_mosaic` and `pyramid`.

    Raises
    ------
    SpecError, SceneError, ShapeError, ExactnessError, OutputError, MemoryBudgetError : before work
        starts; OutputError on a disk that fills up, with the finished tiles kept.
    """
    net = as_network(model, normalise, classes)
    check_exactness(net.spec, halo, exact)
    path = None if out is None else Path(out)
    if path is not None:
        check_output(path)
    scene = as_scene(scene, net.spec)
    dtype = "float16" if probabilities is True else probabilities or None
    if dtype not in (None, "float16", "float32", "uint8"):
        fail(
            OutputError,
            rule="probabilities is False, True, 'float16', 'float32' or 'uint8'",
            got=repr(probabilities),
            remedy="Take True.",
        )
    asked = Asked(net, scene, tile, precision, halo, exact, dtype, batch, memory_bytes)
    if path is None:
        _check_memory(asked)
        return _in_memory(asked.plan(None), progress)
    finished = read_attrs(path) if path.exists() else None
    if path.exists() and not overwrite:
        return _reopen(path, finished, asked, progress)
    if path.exists() and finished is None:
        fail(
            OutputError,
            rule="overwrite replaces mosaics only",
            got=f"{path}, which is something else",
            remedy="Choose another path, or remove it yourself.",
        )
    work = WorkStore(path)
    work.lock()
    try:
        return _to_disk(asked, work, overwrite, resume, progress)
    finally:
        if not work.journal.exists():  # nothing was begun: leave nothing behind
            work.discard()
        work.close()


def _bar(run: Run, done: set[int], progress: bool) -> Any:
    total = sum(len(unit) for unit in run.units)
    initial = sum(len(run.units[i]) for i in done)
    return tqdm(
        total=total,
        initial=initial,
        unit="tile",
        desc="mosaic",
        disable=not progress,
        dynamic_ncols=True,
    )


def _advance(bar: Any, pixels: int, tiles: int) -> None:
    bar.update(tiles)
    elapsed = bar.format_dict["elapsed"] or 0
    if elapsed > 0:
        bar.set_postfix_str(f"{pixels / 1e6 / elapsed:.2f} MP/s", refresh=False)


def _network(run: Run) -> TileNetwork:
    return TileNetwork(run.net.model, precision=run.settings.precision, device=run.device)


def _warn(run: Run, probed: dict[str, Any]) -> None:
    if probed:
        warnings.warn(
            f"halo {run.settings.halo} is smaller than the exact {run.net.spec.halo_aligned}: on "
            f"{probed['probed_tiles']} tiles, logits differ by up to "
            f"{probed['max_logit_difference']:.3g} and {probed['label_disagreement']:.3%} of the "
            "labels differ",
            InexactWarning,
            stacklevel=4,
        )


def _check_memory(asked: Asked) -> None:
    need, free = sum(asked.output_bytes()), available_bytes(torch.device("cpu"))
    if need > free // 2:
        fail(
            MemoryBudgetError,
            rule=f"a result in memory takes at most half of the {free / 2**30:.1f} GiB available",
            got=f"{need / 2**30:.1f} GiB",
            remedy="Pass out='mosaic.zarr'.",
        )


def _in_memory(run: Run, progress: bool) -> xr.Dataset:
    network = _network(run)
    probed = probe(run, network)
    _warn(run, probed)
    labels = np.full(run.shape, IGNORE, np.uint8)
    shares = None
    if run.probabilities is not None:
        shares = np.empty((run.probabilities[0], *run.shape), run.probabilities[1])
    ignored, pixels = 0, 0
    with _bar(run, set(), progress) as bar:
        for _, parts in results(run, network, set()):
            for tile, chosen, share, missing in parts:
                labels[tile.write.slices] = chosen
                if shares is not None:
                    shares[(..., *tile.write.slices)] = share
                ignored += missing
                pixels += tile.write.area
            _advance(bar, pixels, len(parts))
    data = xr.Dataset(
        {"labels": (("y", "x"), labels, run.label_attrs())},
        coords=run.coords(),
        attrs=run.attrs(ignored, probed),
    )
    if shares is not None:
        names = list(run.classes.names[-shares.shape[0] :])
        data["probabilities"] = (("class", "y", "x"), shares, {"units": "1"})
        data = data.assign_coords({"class": names})
    return data


def _reopen(path: Path, attrs: dict[str, Any] | None, asked: Asked, progress: bool) -> xr.Dataset:
    """A finished output: opened where it is of the same run, refused otherwise."""
    remedy = "Pass overwrite=True to replace it, or choose another path."
    if attrs is None:
        fail(
            OutputError,
            rule="an output goes to a new path",
            got=f"{path}, which exists and is no mosaic",
            remedy="Choose another path.",
        )
    run = asked.plan(attrs)
    own = run.attrs(0, {})
    names = [n for n in run.settings.to_dict() if n not in ("threads", "batch")]
    differences = [n for n in names if own[n] != attrs.get(n)]
    if differences:
        fail(
            OutputError,
            rule="an output of another run is not touched",
            got=f"{path}, which differs in {', '.join(differences)}",
            remedy=remedy,
        )
    left_over = WorkStore(path)
    if left_over.folder.exists():  # killed after its last rename, or another process at work
        left_over.lock()
        left_over.discard()
        left_over.close()
    if progress:
        tqdm.write(f"{path} is complete already: opened, nothing computed")
    return open_mosaic(path)


def _to_disk(
    asked: Asked, work: WorkStore, overwrite: bool, resume: bool, progress: bool
) -> xr.Dataset:
    path = work.out
    keep = f"The finished tiles are kept in {work.folder.name}; the same call resumes."
    work.load()
    if work.header is not None and not resume:
        work.clear()
    _check_disk(asked, work)
    earlier = work.header
    run = asked.plan(earlier["settings"] if earlier else None)
    differences = run.settings.differences(earlier["settings"]) if earlier else []
    if differences and not overwrite:
        fail(
            OutputError,
            rule="an unfinished output of another run is not touched",
            got=f"{work.folder}, which differs in {', '.join(differences)}",
            remedy="Run it to its end, or pass overwrite=True to drop it.",
        )
    if differences:
        work.clear()
        earlier, run = None, asked.plan(None)
    network = _network(run)
    with disk_errors(str(work.folder), keep):
        if earlier is None:
            probed = probe(run, network)
            work.create(
                {"settings": run.settings.to_dict(), "probe": probed},
                run.shape,
                run.settings.tile,
                run.coords(),
                run.probabilities,
                run.label_attrs(),
            )
        else:
            probed = earlier["probe"]
            work.resume()
        _warn(run, probed)
        try:
            _fill(run, network, work, progress)
        except KeyboardInterrupt as error:
            error.add_note(keep)
            raise
        attrs = run.attrs(sum(work.done.values()), probed)
        work.finish(attrs, run.step())
        made = work.path
        if path.suffix.lower() != ".zarr":
            made = _convert(run, work, attrs)
        work.publish(made, replace=overwrite)
    return open_mosaic(path)


def _fill(run: Run, network: TileNetwork, work: WorkStore, progress: bool) -> None:
    pixels = 0
    with _bar(run, set(work.done), progress) as bar:
        for unit, parts in results(run, network, set(work.done)):
            for part in parts:
                work.write(part.tile.write, part.labels, part.shares)
                pixels += part.tile.write.area
            work.mark(unit, sum(part.ignored for part in parts))
            _advance(bar, pixels, len(parts))


def _check_disk(asked: Asked, work: WorkStore) -> None:
    """Room for the whole output, uncompressed, less what is there already."""
    labels, shares = asked.output_bytes()
    copies = 1 if work.out.suffix.lower() == ".zarr" else 2
    need = copies * (labels * 4 // 3 + shares) + 2**20
    there = sum(p.stat().st_size for p in work.folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(work.folder).free
    if need - there > free:
        fail(
            OutputError,
            rule=f"the output may need {need / 2**20:.1f} MiB on its disk",
            got=f"{free / 2**20:.1f} MiB free at {work.out.parent}",
            remedy="Free space, or choose another disk.",
        )


def _convert(run: Run, work: WorkStore, attrs: dict[str, Any]) -> Path:
    """The finished store as GeoTIFF, made in the work folder."""
    group = zarr.open_group(str(work.path), mode="r")
    place = run.label_attrs()
    if run.probabilities is not None:
        made = work.folder / "probabilities.tif"
        write_probabilities(made, group["probabilities"], run.classes.names, place)
        made.replace(probabilities_path(work.out))
    made = work.folder / "result.tif"
    write_labels(made, group["labels"], attrs, run.classes, place)
    return made
