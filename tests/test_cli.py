"""The command line as a user runs it: help, text, JSON, errors and exit status."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from bigunet.cli import app

RUN = CliRunner()
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


def bigunet(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bigunet", *args], capture_output=True, text=True, timeout=120
    )


def test_halo_prints_the_exact_halo_as_json():
    done = bigunet("halo", "--levels", "5", "--convs", "2", "--kernel", "3", "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert list(values.items())[:3] == [("halo", 94), ("stride", 16), ("halo_aligned", 96)]
    assert values["flops_ratio"] == pytest.approx((448 / 256) ** 2)
    assert 1 < values["flops_ratio_cropped"] < values["flops_ratio"]


def test_info_prints_every_layer():
    result = RUN.invoke(app, ["info", "--levels", "3", "--channels", "4", "--json"])
    values = json.loads(result.stdout)
    assert values["parameters"] == sum(row["parameters"] for row in values["layers"])
    text = RUN.invoke(app, ["info", "--levels", "3", "--channels", "4"]).stdout
    assert all(row["name"] in text for row in values["layers"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command):
    result = RUN.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_a_spec_comes_from_yaml_and_options_override_it(tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text("levels: 3\nconvs: 1\n")
    result = RUN.invoke(app, ["halo", "--spec", str(path), "--convs", "2", "--json"])
    assert json.loads(result.stdout)["halo"] == 22
    path.write_text("spec:\n  levels: 3\n  convs: 2\n")
    result = RUN.invoke(app, ["halo", "--spec", str(path), "--json"])
    assert json.loads(result.stdout)["halo"] == 22


@pytest.mark.parametrize(
    ("text", "says"),
    [("levels: [", "YAML"), ("- 1", "mapping"), ("depth: 3", "depth"), ("levels: 0", "levels")],
)
def test_a_bad_spec_file_says_why(tmp_path, text, says):
    path = tmp_path / "net.yaml"
    path.write_text(text)
    done = bigunet("halo", "--spec", str(path))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_json_where_json_was_asked_for():
    done = bigunet("halo", "--kernel", "4", "--json")
    assert done.returncode == 2
    assert "kernel is odd" in json.loads(done.stdout)["error"]["rule"]


PLAIN = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "rasterio", "zarr", "ipywidgets", "nbclient"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from bigunet.cli import main
main()
"""


@pytest.mark.parametrize("command", ["halo", "info", "memory", "fit --budget-gib 1", "stages"])
def test_a_plain_installation_plans(command):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *command.split()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_what_is_not_installed_is_said():
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, "segment", "earth", "--out", "m.zarr"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version():
    assert RUN.invoke(app, ["--version"]).stdout.strip()


def test_train_by_a_plan_takes_the_options_of_training(tmp_path):
    """Scores on the way, and rounded weights, in one process without stages beside."""
    scene, plan, out = "synthetic:32x48:3", str(tmp_path / "plan.yaml"), tmp_path / "run"
    network = ["--levels", "2", "--convs", "1", "--channels", "4", "--classes", "5"]
    work = ["--scene", scene, "--tile", "16", "--batch", "2", "--steps", "3", "--stages", "2"]
    done = RUN.invoke(app, ["stages", *network, *work, "--micro-batches", "2", "--out", plan])
    assert done.exit_code == 0, done.output
    run = ["train", scene, "--plan", plan, "--engine", "reference", "--out", str(out), "--quiet"]
    asked = ["--val-image", scene, "--validate-every", "1", "--weights-dtype", "bf16", "--json"]
    done = RUN.invoke(app, [*run, *asked])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "mean_iou" in row] == [1, 2, 3]
    with safe_open(json.loads(done.stdout)["weights"], "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert types["layers.head.weight"] == "BF16"
    assert types["layers.head.bias"] == "F32"
