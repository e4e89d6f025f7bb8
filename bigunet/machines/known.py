"""Processors and machines by name, every figure from its vendor or its centre.

A rate here is what a data sheet states, so a prediction built on it is a bound that real code
comes near to; seconds of one's own machine come from calibration (`bigunet.cost.MeasuredCost`).
"""

from __future__ import annotations

from collections.abc import Mapping

from bigunet.machines.parts import FileSystem, Link, Machine, Processor

__all__ = ["MACHINES", "PROCESSORS"]

_GB = 1e9
_GiB = 2**30

# What starting a kernel costs in a stream of them: NVIDIA, "Getting Started with CUDA Graphs"
# (developer.nvidia.com/blog/cuda-graphs, 2019): 3.8 us a kernel of 2.9 us on a V100, launches
# overlapped. Vendors state no figure of their own for the others.
_LAUNCH = 4e-6

# GPU makers count a "GB" of HBM2 and GDDR5 as 2^30 bytes; the H200's 141 GB are 10^9.
# PyTorch's convolutions use TF32 for fp32 by default, where there are units for it.
_TABLE = (
    Processor(
        "V100-16GB", {"fp32": 15.7e12}, 900 * _GB, 16 * _GiB, _LAUNCH,
        "NVIDIA V100 data sheet (2020), SXM2: 15.7 TFLOP/s fp32, no units for bf16, 900 GB/s, "
        "16 GB HBM2, 300 W",
        300.0,
    ),
    Processor(
        "V100-32GB", {"fp32": 15.7e12}, 900 * _GB, 32 * _GiB, _LAUNCH,
        "NVIDIA V100 data sheet (2020), SXM2: as V100-16GB with 32 GB HBM2", 300.0,
    ),
    Processor(
        "P40", {"fp32": 11.76e12}, 346 * _GB, 24 * _GiB, _LAUNCH,
        "NVIDIA Tesla P40 data sheet (2016): 12 TFLOP/s fp32 (3840 cores x 2 x 1.531 GHz), no "
        "units for bf16, 346 GB/s, 24 GB GDDR5, 250 W",
        250.0,
    ),
    Processor(
        "A100-40GB", {"fp32": 156e12, "bf16": 312e12}, 1555 * _GB, 40 * _GiB, _LAUNCH,
        "NVIDIA A100 data sheet (2021), SXM4: TF32 156, bf16 312 TFLOP/s, 1555 GB/s, 40 GB HBM2, "
        "400 W",
        400.0,
    ),
    Processor(
        "A100-80GB", {"fp32": 156e12, "bf16": 312e12}, 2039 * _GB, 80 * _GiB, _LAUNCH,
        "NVIDIA A100 data sheet (2021), SXM4: as A100-40GB with 80 GB HBM2e at 2039 GB/s", 400.0,
    ),
    Processor(
        "MI250X-GCD", {"fp32": 47.85e12, "bf16": 191.5e12}, 1638 * _GB, 64 * _GiB, _LAUNCH,
        "AMD Instinct MI250X data sheet (2021), halved, as it has two dies: matrix fp32 95.7, "
        "bf16 383 TFLOP/s, 3276.8 GB/s, 128 GB HBM2e, 560 W peak",
        280.0,
    ),
    Processor(
        "H200", {"fp32": 494.5e12, "bf16": 989.5e12}, 4800 * _GB, 141 * 10**9, _LAUNCH,
        "NVIDIA H200 data sheet (2024), SXM: TF32 989, bf16 1979 TFLOP/s with sparsity (half of it "
        "dense), 4.8 TB/s, 141 GB HBM3e, 700 W",
        700.0,
    ),
)  # fmt: skip

PROCESSORS: Mapping[str, Processor] = {entry.name: entry for entry in _TABLE}

# What a step of a collective costs on a link besides its bytes: NCCL's own cost model
# (github.com/NVIDIA/nccl, src/graph/tuning.cc, hwLat, ring, protocol Simple). AMD's RCCL, which
# descends from it, is taken to be alike. The way through two CPUs counts as PCIe there.
_ON_NVLINK, _ON_PCIE, _ON_NETWORK = 3.4e-6, 5.7e-6, 9.6e-6
_NCCL = "; latency: NCCL's tuning.cc"

_PCIE3 = Link(
    "PCIe 3.0 x16", 15.75 * _GB, _ON_PCIE, "PCI-SIG: 8 GT/s x 16 lanes, 128b/130b" + _NCCL
)
_NVLINK2 = Link(
    "NVLink2", 50 * _GB, _ON_NVLINK,
    "OLCF Summit user guide: two links of 25 GB/s each way between processors" + _NCCL,
)  # fmt: skip
_XBUS = Link(
    "X-bus", 64 * _GB / 2, _ON_PCIE,
    "WikiChip, Summit: 4 bytes at 16 GT/s, 64 GB/s both ways together" + _NCCL,
)  # fmt: skip
_EDR2 = Link(
    "dual-rail EDR InfiniBand", 23 * _GB, _ON_NETWORK,
    "OLCF Summit user guide: 23 GB/s into a node" + _NCCL,
)  # fmt: skip
_EDR = Link("EDR InfiniBand", 12.5 * _GB, _ON_NETWORK, "Mellanox EDR: 100 Gbit/s a port" + _NCCL)
_NVLINK3 = Link(
    "NVLink3", 100 * _GB, _ON_NVLINK,
    "NERSC, Perlmutter architecture: four links of 25 GB/s each way a pair of GPUs" + _NCCL,
)  # fmt: skip
_NVLINK4 = Link(
    "NVLink4", 450 * _GB, _ON_NVLINK,
    "NVIDIA H200 data sheet: 900 GB/s both ways together" + _NCCL,
)  # fmt: skip
_SLINGSHOT = Link(
    "Slingshot 11", 25 * _GB, _ON_NETWORK, "HPE Slingshot 11: 200 Gbit/s a card" + _NCCL
)
_NDR = Link("NDR InfiniBand", 50 * _GB, _ON_NETWORK, "NVIDIA NDR: 400 Gbit/s a port" + _NCCL)

_SUMMIT = Machine(
    "summit",
    PROCESSORS["V100-16GB"],
    6,
    _NVLINK2,
    _XBUS,
    _EDR2,
    per_socket=3,
    notes="OLCF Summit user guide: 6 V100 a node, 3 a socket, 4,608 nodes; shut down in 2024.",
    injection_bytes_per_second=23 * _GB,
    file_system=FileSystem(
        "Alpine (GPFS)", 23 * _GB, 2500 * _GB,
        "OLCF Summit user guide: 2.5 TB/s peak (stated for writing); a node: its network",
    ),
    num_nodes=4608,
    scheduler="lsf",
)  # fmt: skip
_P40 = Machine("p40", PROCESSORS["P40"], 8, _PCIE3, _PCIE3, _EDR, per_socket=8)
_PERLMUTTER = Machine(
    "perlmutter",
    PROCESSORS["A100-40GB"],
    4,
    _NVLINK3,
    _NVLINK3,
    _SLINGSHOT,
    per_socket=4,
    notes="NERSC, Perlmutter architecture: 1,536 nodes of 40 GB GPUs (and 256 of 80 GB ones), 4 "
    "GPUs and 4 network cards a node. Beside the GPUs: one AMD EPYC 7763, 280 W (AMD).",
    injection_bytes_per_second=100 * _GB,
    file_system=FileSystem(
        "Perlmutter scratch (Lustre)", 100 * _GB, 5000 * _GB,
        "NERSC: all-flash Lustre, more than 5 TB/s; a node: its network",
    ),
    num_nodes=1536,
    scheduler="slurm",
    overhead_watts=280.0,
)  # fmt: skip
_FRONTIER = Machine(
    "frontier",
    PROCESSORS["MI250X-GCD"],
    8,
    Link(
        "Infinity Fabric in an MI250X", 200 * _GB, _ON_NVLINK,
        "OLCF Frontier user guide: 200 GB/s each way between the two dies" + _NCCL,
    ),
    Link(
        "Infinity Fabric between MI250X", 50 * _GB, _ON_NVLINK,
        "OLCF Frontier user guide: 50 to 100 GB/s; the least of them" + _NCCL,
    ),
    _SLINGSHOT,
    per_socket=2,
    notes="OLCF Frontier user guide: 4 MI250X of 2 dies a node, 4 network cards, 9,856 nodes "
    "(9,408 when it opened).",
    injection_bytes_per_second=100 * _GB,
    file_system=FileSystem(
        "Orion (Lustre)", 100 * _GB, 5500 * _GB,
        "OLCF (2021): capacity tier, 5.5 TB/s peak read; a node: its network",
    ),
    num_nodes=9856,
    scheduler="slurm",
)  # fmt: skip
_H200 = Machine(
    "h200",
    PROCESSORS["H200"],
    8,
    _NVLINK4,
    _NVLINK4,
    _NDR,
    per_socket=8,
    notes="NVIDIA DGX H200 data sheet: 8 GPUs, 8 ports for them, 10.2 kW at most. 127 nodes: a "
    "DGX SuperPOD of four units.",
    injection_bytes_per_second=400 * _GB,
    num_nodes=127,
    scheduler="slurm",
    overhead_watts=10_200.0 - 8 * 700.0,
)
_ONE_H200 = Machine(
    "one-h200",
    PROCESSORS["H200"],
    1,
    _NVLINK4,
    _NVLINK4,
    _NDR,
    notes="A single H200 by itself: what one device does.",
)

MACHINES: Mapping[str, Machine] = {
    entry.name: entry for entry in (_SUMMIT, _P40, _PERLMUTTER, _FRONTIER, _H200, _ONE_H200)
}
