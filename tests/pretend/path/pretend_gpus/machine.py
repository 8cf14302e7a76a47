"""The GPUs of the pretend node, from the environment. No torch here: nvidia-smi imports it."""

import os
from dataclasses import dataclass

GiB, MiB = 2**30, 2**20
CONTEXT = 480 * MiB  # of a process on a GPU, before its first tensor


@dataclass(frozen=True)
class Kind:
    """One kind of GPU. usable: bytes that CUDA reports. mib: what nvidia-smi prints. link: between
    two of them, as `nvidia-smi topo -m` names it."""

    name: str
    usable: int
    mib: int
    capability: tuple[int, int]
    link: str


KINDS = {
    "T4": Kind("Tesla T4", round(14.56 * GiB), 15360, (7, 5), "PHB"),
    "A100": Kind("NVIDIA A100-SXM4-80GB", round(79.25 * GiB), 81920, (8, 0), "NV12"),
    "H100": Kind("NVIDIA H100 80GB HBM3", round(79.11 * GiB), 81559, (9, 0), "NV18"),
}


def count() -> int:
    """Returns the number of GPUs, after CUDA_VISIBLE_DEVICES."""
    found = int(os.environ["PRETEND_GPUS"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    numbers = [part for part in visible.split(",") if part.strip().isdigit()]
    return min(found, len(numbers))


def kind() -> Kind:
    """Returns the kind of all GPUs: PRETEND_GPU, or an A100; a single one is a T4."""
    default = "T4" if int(os.environ["PRETEND_GPUS"]) == 1 else "A100"
    return KINDS[os.environ.get("PRETEND_GPU") or default]


def total() -> int:
    """Returns the bytes of one GPU that CUDA reports; PRETEND_GPU_BYTES overrides them."""
    return int(float(os.environ.get("PRETEND_GPU_BYTES") or kind().usable))
