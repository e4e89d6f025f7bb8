"""Measured scaling in files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bigunet.errors import OutputError
from bigunet.scaling_file import (
    load_scaling,
    measured_curve,
    new_scaling,
    save_scaling,
    scaling_setting,
)
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec(levels=3, channels=8, classes=3)
TRAIN = TrainSpec(tile=32, optimiser="sgd")


def measured(kind: str = "strong") -> xr.Dataset:
    table = new_scaling(
        SPEC, TRAIN, (64, 96), (2, 4, 8), kind=kind, images=[1, 1, 1] if kind == "strong" else
        [2, 4, 8], num_tiles=[6, 6, 6], rounds=3, threads=1, device="cpu",
    )  # type: ignore[arg-type]  # fmt: skip
    table["step_seconds"].values[:2] = [[8.0, 6.0, 7.0], [4.0, np.nan, 3.0]]
    return table


def test_a_file_gives_the_table_back(tmp_path: Path) -> None:
    path = tmp_path / "here.nc"
    table = measured()
    save_scaling(table, path)
    save_scaling(table, path)  # once more over it
    assert list(tmp_path.iterdir()) == [path]
    loaded = load_scaling(path)
    xr.testing.assert_identical(loaded, table)
    assert scaling_setting(loaded) == (SPEC, TRAIN, (64, 96))
    assert {"cpu", "torch", "python", "date", "bigunet"} <= set(
        json.loads(loaded.attrs["environment"])
    )
    assert loaded.idle_gpus.values.tolist() == [0, 0, 2]
    assert all("units" in loaded[name].attrs for name in loaded.data_vars)


def test_speed_up_and_efficiency_by_hand() -> None:
    """7 s on 2 ranks and 3.5 s on 4: as on 1 rank in 14 s, if 2 scale perfectly."""
    curve = measured_curve(measured())
    assert curve.gpus.values.tolist() == [2, 4]  # 8 was not measured
    assert curve.step_seconds.values.tolist() == [7.0, 3.5]
    assert curve.speedup.values.tolist() == [2.0, 4.0]
    assert curve.efficiency.values.tolist() == [1.0, 1.0]
    weak = measured_curve(measured("weak"))
    assert weak.images_per_second.values == pytest.approx([2 / 7, 4 / 3.5])
    assert weak.efficiency.values == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.assign_attrs(version=2), r"version 1.*got version 2"),
        (lambda t: t.assign_attrs(format="weather"), r"measured by bigunet.*'weather'"),
        (lambda t: t.drop_attrs(), r"measured by bigunet.*None"),
        (lambda t: t.drop_vars("step_seconds"), r"whole; got without step_seconds"),
        (lambda t: t.assign_attrs(train="{}}"), r"whole"),
        (lambda t: t.assign_attrs(spec=json.dumps({"levels": -1})), r"levels"),
    ],
)
def test_foreign_files_are_refused(spoil: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "other.nc"
    spoil(measured()).to_netcdf(path, engine="h5netcdf")  # type: ignore[operator]
    with pytest.raises(OutputError, match=says):
        load_scaling(path)


def test_what_is_no_netcdf_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "text.nc"
    path.write_text("no", encoding="utf-8")
    with pytest.raises(OutputError, match="is a NetCDF file"):
        load_scaling(path)
    with pytest.raises(OutputError, match="no such file"):
        load_scaling(tmp_path / "none.nc")
    with pytest.raises(OutputError, match="can be written"):
        save_scaling(measured(), tmp_path / "none" / "x.nc")
