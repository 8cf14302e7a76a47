"""GPUs as a memory and speed budget, and what CUDA and NCCL take before the first tensor.

All that is known of a GPU stands in one line of `GPUS` or `WORKSTATION_GPUS`; whatever takes the
name of a GPU looks it up there. Sources: NVIDIA data sheets: T4 (2019), RTX A6000 (2020), A10
(2021), A100 SXM (2022), H100 SXM (2023), H200 SXM (2024) and HGX B200 (2025). `usable` is the
capacity that CUDA reports, as PyTorch prints it when memory runs out ("has a total capacity of
79.25 GiB"); it differs by some 0.3 GiB between machines (driver, ECC, MIG). Measured bus bandwidth
and fixed overheads: stas00/ml-engineering, network/README.md and training/performance/README.md
@744d01e.
"""

import re
from dataclasses import dataclass, replace

from labs.training.memory_categories import GB, GiB
from labs.words import with_article


@dataclass(frozen=True)
class Generation:
    """What the model of a step's seconds takes from a GPU's generation: shares of peaks that were
    fitted or measured on it stand in step_time/constants.py, by this name.

    network: bytes/s of the network adapters for each GPU, where a job does not say. host_bandwidth:
    bytes/s of the host's memory, both sockets together. host: seconds that its host takes to start
    a kernel, over those of an H100's: 1.4 on an A100's (Megatron-LM's tests, median of 20 pairs).
    """

    name: str
    network: float
    host_bandwidth: float
    host: float = 1.0


# NVIDIA's data sheets of DGX A100 and DGX H100: one adapter per GPU, of 200 and of 400 Gbit/s; two
# AMD EPYC 7742 with 8 channels of DDR4-3200 each, two Intel Xeon 8480C with 8 of DDR5-4800 (8 bytes
# a channel and transfer).
A100 = Generation("A100", network=25e9, host_bandwidth=2 * 204.8 * GB, host=1.4)
H100 = Generation("H100", network=50e9, host_bandwidth=2 * 307.2 * GB)


@dataclass(frozen=True)
class GPU:
    """nominal and usable: bytes. flops: 16-bit FLOP/s, dense, bf16 (T4: fp16; it has no bf16).
    bandwidth: of its memory, bytes/s. nvlink and pcie: bytes/s in one direction (data sheets print
    both directions together); nvlink is 0 where there is none. power: watts, the most it takes.
    generation: that whose constants it has; of T4, A6000, A10, H200 and B200 a guess: no constant
    was fitted to a row of theirs. sheet_tflops: the 16-bit TFLOP/s (1e12) that its data sheet
    prints, and sparse: whether that is with structured sparsity, which doubles them and which
    training does not use. busbw: measured bytes/s of ring all-reduce on 8 GPUs of a node, where
    published; else None.
    """

    name: str
    nominal: float
    usable: float
    flops: float
    bandwidth: float
    nvlink: float
    pcie: float
    power: float
    generation: Generation
    sheet_tflops: float
    sparse: bool
    busbw: float | None = None


def _gpu(name, nominal, usable, teraflops, bandwidth, nvlink, pcie, *rest, busbw=None):
    return GPU(name, nominal * GB, usable * GiB, teraflops * 1e12, bandwidth * GB, nvlink * GB,
               pcie * GB, *rest, busbw and busbw * GB)


GPUS = {gpu.name: gpu for gpu in (
    #    name     nominal, usable  dense,  memory,  links,  power, constants  data sheet
    #                 GB      GiB TFLOP/s    GB/s     GB/s      W  of         TFLOP/s, sparse
    _gpu("T4",        16,   14.56,     65,    300,   0, 16,    70, A100,   65, False),
    _gpu("A10",       24,   22.0,     125,    600,   0, 32,   150, A100,  125, False),
    _gpu("A100-40",   40,   39.50,    312,   1555, 300, 32,   400, A100,  312, False),
    _gpu("A100-80",   80,   79.25,    312,   2039, 300, 32,   400, A100,  312, False),
    _gpu("H100",      80,   79.11,    989,   3350, 450, 64,   700, H100, 1979, True),
    _gpu("H200",     141,  139.8,     989,   4800, 450, 64,   700, H100, 1979, True, busbw=367.2),
    _gpu("B200",     180,  178.3,    2250,   8000, 900, 64,  1000, H100, 4500, True, busbw=682.2),
)}
"""Name -> GPU, in the order of the data sheets' years. H200's and B200's bus bandwidths are those
of 16 and 8 GiB, ring."""

WORKSTATION_GPUS = {gpu.name: gpu for gpu in (
    # https://www.nvidia.com/en-us/products/workstations/rtx-a6000/ has the data sheet; the dense
    # rate of bf16 is half of the sparse one that it prints. Bridges join two cards, so no NVLink.
    _gpu("A6000",     48,   47.54,  154.8,    768,   0, 32,   300, A100, 309.7, True),
)}
"""Name -> GPU of public runs that no notebook compares: charts and checks that go through a table
go through `GPUS`."""

CUDA_CONTEXT = {
    "torch 1.10": 1.78 * GiB,
    "torch 1.13": 0.90 * GiB,
    "torch 2.1, eager loading": 0.92 * GiB,
    "torch 2.1, lazy loading": 0.47 * GiB,
}
"""Bytes that a CUDA context takes on an A100 before the first tensor; lazy loading of kernels is
CUDA's default since 12.2. It counts in nvidia-smi, not in torch.cuda.memory_allocated."""

LOADED_KERNELS = 0.31 * GiB
"""Further bytes of a process that has trained: CUDA loads a kernel when it is first used. On an
H200 with torch 2.11 and CUDA 13 the context took 0.51 GiB after a first tensor, and nine processes
that had trained 1B to 8B took 0.73 to 0.82 GiB beyond what torch had reserved
(experiments/reference/h200/one_rank.json: driver less reserved)."""

NCCL_FIRST_CALL = 1.45 * GiB
"""Further bytes after the first barrier over NCCL: its communicator and buffers. Not allocated by
PyTorch either."""

_BEFORE_HOPPER = 8 * 2**20 + 128 * 2**10
CUBLAS_WORKSPACE = {"sm75": _BEFORE_HOPPER, "sm80": _BEFORE_HOPPER, "sm86": _BEFORE_HOPPER,
                    "sm89": _BEFORE_HOPPER, "sm90": 32 * 2**20}
"""Bytes of cuBLAS's workspace per handle and stream (PyTorch's CUDABlasHandlePool; for Hopper also
NVIDIA/Megatron-LM PR 6936); there are two. It is allocated by PyTorch, and stays."""


def gpu(name) -> GPU:
    """The GPU with this name (or a `GPU`, which is returned as it is)."""
    if isinstance(name, GPU):
        return name
    known = known_gpus()
    if name not in known:
        raise ValueError(f"no GPU {name!r} in the table: choose {', '.join(known)}")
    return known[name]


def known_gpus() -> dict[str, GPU]:
    """Name -> GPU, of both tables."""
    return {**GPUS, **WORKSTATION_GPUS}


def recognised(name: str, total: float) -> GPU:
    """Returns the GPU of the table that CUDA calls `name`, such as "NVIDIA A100-SXM4-80GB", with
    `total` bytes of memory. One that is not in the table gets its own name and memory, and the
    rates of the GPU whose memory comes next to it."""
    known = known_gpus().values()
    kinds = [one for one in known if re.search(rf"\b{one.name.split('-')[0]}\b", name)]
    nearest = min(kinds or known, key=lambda one: abs(one.usable - total))
    called = nearest.name if kinds else f"{name} (rates of {with_article(nearest.name)})"
    return replace(nearest, name=called, usable=total)


def overheads(ranks: int = 1, architecture: str = "sm90") -> dict[str, float]:
    """Name -> bytes that one rank needs in addition to its tensors: CUDA's context, the kernels
    that it loads, cuBLAS and, from 2 ranks on, NCCL."""
    workspace = 2 * CUBLAS_WORKSPACE.get(architecture, CUBLAS_WORKSPACE["sm90"])
    return {"CUDA context": CUDA_CONTEXT["torch 2.1, lazy loading"],
            "loaded kernels": LOADED_KERNELS, "cuBLAS": workspace,
            "NCCL": NCCL_FIRST_CALL if ranks > 1 else 0}


def overhead(ranks: int = 1, architecture: str = "sm90") -> float:
    """Bytes of `overheads` together."""
    return sum(overheads(ranks, architecture).values())


def fits(needed: float, name, ranks: int = 1) -> bool:
    """Whether `needed` bytes of tensors and `overhead` fit on this GPU."""
    return needed + overhead(ranks) <= gpu(name).usable
