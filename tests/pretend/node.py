"""The environment in which a process finds GPUs that are not there."""

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATH = [str(HERE / "path"), str(HERE.parent / "fewer")]  # of what it imports


def environment(gpus: int, kind: str | None = None, nbytes: float | None = None,
                **others: str) -> dict[str, str]:
    """Returns a subprocess's environment with `gpus` pretend GPUs.

    kind: T4, A100 or H100; None: A100s, and a single GPU is a T4. nbytes: of each GPU's memory;
    given, a rank cannot allocate more. others: further variables. Without GPUs the process is an
    ordinary one that can still note which of the GPU's lines it runs. Whatever one process starts
    is on one node: nvidia-smi shows no other process's.
    """
    path = [*PATH, str(ROOT), os.environ.get("PYTHONPATH", "")]
    made = {**os.environ, "PRETEND_GPUS": str(gpus or ""), "PRETEND_NODE": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(filter(None, path))}
    if gpus:
        made["PATH"] = os.pathsep.join([str(HERE / "bin"), os.environ.get("PATH", "")])
    made.pop("CUDA_VISIBLE_DEVICES", None)
    for name, value in (("PRETEND_GPU", kind), ("PRETEND_GPU_BYTES", nbytes)):
        made.pop(name, None)
        if value is not None:
            made[name] = str(value)
    return {**made, **others}
