"""The GPUs of this machine: names, memory, links and versions, and how much memory is in use."""

import contextlib
import json
import platform
import subprocess
import sys
import time

from _unattended import nvidia_smi

ANSWER = 180  # seconds, for the driver to wake up: without its persistence mode it takes some
TOLERATED = 64  # MiB by which the driver's own figure may change


def found() -> dict:
    """Returns what this machine has: "gpus" as [{name, bytes, capability}], and versions. Makes a
    CUDA context in this process, so it runs in one of its own."""
    import torch

    from labs.workers import cuda

    gpus = []
    for index in range(cuda.count()):
        cuda.use(f"cuda:{index}")
        gpus.append({"name": cuda.name(), "bytes": cuda.total_memory(),
                     "capability": list(cuda.capability())})
    return {"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": platform.python_version(), "transformers": _version("transformers")}


def asked() -> dict:
    """What `found` returns, from a process of its own: the question makes a CUDA context, and the
    process that asks must hold none of the GPU's memory. Without GPUs if that fails."""
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "_unattended.machine"],
                              capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        print(f"torch did not say within {ANSWER} s which GPUs there are.", file=sys.stderr)
        return {"gpus": []}
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"gpus": []}
    return json.loads(done.stdout.splitlines()[-1])


def _version(package) -> str | None:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def title(found: dict) -> str:
    """"8x NVIDIA A100-SXM4-80GB"."""
    names = [gpu["name"] for gpu in found["gpus"]]
    return f"{len(names)}x {names[0]}" if len(names) > 1 else names[0]


def used_memory() -> list[int]:
    """MiB in use on each GPU, as the driver counts them, of all processes; empty where there is no
    nvidia-smi."""
    with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
        return [int(cell) for cell in nvidia_smi.query("memory.used").get("memory.used", ())]
    return []


def memory_left(before: list[int], seconds: float = 10.0) -> float | None:
    """Returns MiB more in use now than `before`, on the GPU with the most, after `seconds` to clear
    up; 0 for less than the driver's own figure varies; None where nothing tells."""
    deadline = time.monotonic() + seconds
    while True:
        now = used_memory()
        if not before or len(now) != len(before):
            return None
        more = max(after - used for after, used in zip(now, before, strict=True))
        if more <= TOLERATED or time.monotonic() > deadline:
            return more if more > TOLERATED else 0
        time.sleep(0.5)


def _print_reports():
    """What the driver says of the links, and torch of everything: for the log."""
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"],
                    [sys.executable, "-P", "-m", "torch.utils.collect_env"]):
        print(f"\n$ {' '.join(command)}", flush=True)
        try:
            subprocess.run(command, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            print(error)


if __name__ == "__main__":
    result = found()
    if sys.argv[1:]:
        with open(sys.argv[1], "w") as file:
            json.dump(result, file, indent=1)
        _print_reports()
    print(json.dumps(result))
