"""Mosaic speed: MONAI's sliding window, plain haloed tiles, and bigunet, on the same weights.

All methods start from the same uint8 scene in memory and end with uint8 labels, in this one
process, with the same number of threads. Rounds alternate between the methods, so that a busy
machine slows all of them; ratios are those of the medians.

CPU seconds are given too: on a busy machine, with `--threads 1`, theirs is the ratio to look at
(with more threads, waiting for each other counts as CPU time).

    python benchmarks/mosaic_vs_monai.py            # 2048 x 2048, tile 512: some minutes
    python benchmarks/mosaic_vs_monai.py --quick    # 1024 x 1024, two rounds
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigunet import UNetSpec, tile_image
from bigunet.model import UNet
from bigunet.mosaic import cpu_has_bf16, segment
from bigunet.scenes import Normalise, earth, synthetic

Array = np.ndarray[Any, Any]


def cpu_name() -> str:
    """The CPU's model as Linux names it, or what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048, help="side of the scene, pixels")
    parser.add_argument("--tile", type=int, default=512, help="tile core and MONAI window, pixels")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="1024 x 1024, two rounds")
    args = parser.parse_args()
    if args.quick:
        args.size, args.rounds = min(args.size, 1024), 2
    result = run(args)
    print(json.dumps(result, indent=1) if args.json else table(result))


def run(args: argparse.Namespace) -> dict[str, Any]:
    from monai.inferers import sliding_window_inference  # slow to import

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    spec = UNetSpec(levels=args.levels, channels=args.channels, classes=8)
    net = UNet(spec).eval()
    scene = synthetic((args.size, args.size), seed=0).image.compute()
    normalise = Normalise((110.0,) * 3, (60.0,) * 3)
    pixels = np.asarray(scene)
    with torch.inference_mode():
        # Logits of deviation 1, as a trained network's: fp32 rounds relative to the largest.
        x = torch.from_numpy(normalise.apply(pixels[:, :256, :256]))[None]
        net.layers["head"].weight /= net(x).std()
    overlap = 2 * spec.halo_aligned / args.tile
    if overlap >= 1:
        sys.exit(f"--tile must be more than twice the halo {spec.halo_aligned}")
    uncropped = tile_image((args.size, args.size), args.tile, spec, cropped=False)
    last = net.to(memory_format=torch.channels_last)

    def monai() -> Array:
        x = torch.from_numpy(normalise.apply(pixels))[None]
        roi = (args.tile, args.tile)
        y = sliding_window_inference(x, roi, 1, net, overlap=overlap, progress=False)
        return y.argmax(1)[0].to(torch.uint8).numpy()

    def plain(layout: torch.memory_format) -> Array:
        x = torch.from_numpy(normalise.apply(pixels))[None]
        labels = np.empty((args.size, args.size), np.uint8)
        for tile in uncropped:
            part = x[(..., *tile.read.slices)].contiguous(memory_format=layout)
            labels[tile.write.slices] = net.forward_tile(part, tile).argmax(1)[0].numpy()
        return labels

    def ours(precision: str) -> Array:
        data = segment(
            net, scene, tile=args.tile, precision=precision, normalise=normalise, progress=False
        )
        return data["labels"].values

    plain_layout = torch.contiguous_format
    methods: dict[str, Callable[[], Array]] = {
        "MONAI sliding_window_inference, fp32": monai,
        "plain haloed tiles, fp32": lambda: plain(plain_layout),
        "plain haloed tiles, fp32, channels last": lambda: plain(torch.channels_last),
        "bigunet, fp32": lambda: ours("fp32"),
        "bigunet, bf16": lambda: ours("bf16"),
    }
    # The rivals' weights have the layout that their input has.
    layouts = dict.fromkeys(list(methods)[:2], torch.contiguous_format)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    worked: dict[str, list[float]] = {name: [] for name in methods}
    labels: dict[str, Array] = {}
    with torch.inference_mode():
        for round_ in range(args.rounds + 1):
            for name, method in methods.items():
                net.to(memory_format=layouts.get(name, torch.channels_last))
                start, cpu = time.perf_counter(), time.process_time()
                labels[name] = method()
                if round_:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
                    worked[name].append(time.process_time() - cpu)
        net.to(memory_format=torch.contiguous_format)
        x = torch.from_numpy(normalise.apply(pixels))[None]
        whole = last(x)
        shares = torch.softmax(whole, 1)[0].numpy()
        reference = whole.argmax(1)[0].numpy()
        window = sliding_window_inference(x, (args.tile,) * 2, 1, net, overlap=overlap)
        errors = {"MONAI sliding_window_inference, fp32": softmax_error(window, shares)}
        del window, whole
    exact = segment(
        net,
        scene,
        tile=args.tile,
        precision="fp32",
        normalise=normalise,
        probabilities="float32",
        progress=False,
    )
    errors["bigunet, fp32"] = float(np.abs(exact["probabilities"].values - shares).max())
    base = statistics.median(seconds["MONAI sliding_window_inference, fp32"])
    base_cpu = statistics.median(worked["MONAI sliding_window_inference, fp32"])
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        rows.append(
            {
                "method": name,
                "seconds": median,
                "megapixels_per_second": args.size**2 / 1e6 / median,
                "speed_over_monai": base / median,
                "cpu_seconds": statistics.median(worked[name]),
                "cpu_speed_over_monai": base_cpu / statistics.median(worked[name]),
                "labels_equal_to_whole_image": float((labels[name] == reference).mean()),
                "max_probability_difference": errors.get(name),
            }
        )
    return {
        "cpu": cpu_name(),
        "amx_bf16": has_amx(),
        "bf16_in_hardware": cpu_has_bf16(),
        "threads": args.threads,
        "torch": torch.__version__,
        "spec": spec.to_dict(),
        "size": args.size,
        "tile": args.tile,
        "halo": spec.halo_aligned,
        "rounds": args.rounds,
        "rows": rows,
        "trained": agreement(args.quick),
    }


def softmax_error(logits: torch.Tensor, shares: Array) -> float:
    return float(np.abs(torch.softmax(logits, 1)[0].numpy() - shares).max())


def agreement(quick: bool) -> dict[str, Any] | None:
    """Labels of the shipped network on the built-in Earth scene, bf16 against fp32."""
    try:
        from bigunet.checkpoint import demo_weights

        weights = demo_weights()
    except (ImportError, ValueError) as error:
        warnings.warn(f"no trained weights: {error}", stacklevel=1)
        return None
    scene = earth().image
    if quick:
        scene = scene[:, 200:1224, 1000:2024]
    found = {
        precision: segment(weights, scene, precision=precision, progress=False)["labels"].values
        for precision in ("fp32", "bf16")
    }
    equal = float((found["fp32"] == found["bf16"]).mean())
    return {"scene": "earth", "shape": list(scene.shape), "bf16_labels_equal_to_fp32": equal}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['cpu']}, AMX {'yes' if result['amx_bf16'] else 'no'}, "
        f"{result['threads']} threads, torch {result['torch']}",
        f"{result['spec']['levels']} levels, {result['spec']['channels']} channels, "
        f"{result['size']} x {result['size']}, tile {result['tile']}, halo {result['halo']}, "
        f"median of {result['rounds']} alternating rounds",
        "",
        f"{'method':<40} {'s':>7} {'MP/s':>6} {'x MONAI':>8} {'CPU s':>6} {'x MONAI':>8} "
        f"{'labels =':>9} {'max dp':>8}",
    ]
    for row in result["rows"]:
        error = row["max_probability_difference"]
        shown = "" if error is None else f"{error:.1e}"
        lines.append(
            f"{row['method']:<40} {row['seconds']:7.2f} {row['megapixels_per_second']:6.2f} "
            f"{row['speed_over_monai']:8.2f} {row['cpu_seconds']:6.2f} "
            f"{row['cpu_speed_over_monai']:8.2f} "
            f"{row['labels_equal_to_whole_image']:9.4%} {shown:>8}"
        )
    lines += [
        "",
        "labels =: equal to the whole image's in fp32 (random weights: many near ties);",
        "max dp: largest difference of a class probability from the whole image's.",
    ]
    trained = result["trained"]
    if trained:
        share = trained["bf16_labels_equal_to_fp32"]
        lines.append(f"trained network on {trained['scene']}: {share:.3%} of bf16 labels as fp32's")
    else:
        lines.append("trained network: not there, agreement of bf16 labels not measured")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
