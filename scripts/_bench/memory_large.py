"""Dry runs of jobs that fit on no machine here, each in a process of its own: seconds and RAM."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON = dict(vocab_size=128256, num_key_value_heads=8)
JOBS = {
    "dryrun_70b_1024": (1024, dict(COMMON, hidden_size=8192, intermediate_size=28672,
                                   num_hidden_layers=80, num_attention_heads=64)),
    "dryrun_8b_8": (8, dict(COMMON, hidden_size=4096, intermediate_size=14336,
                            num_hidden_layers=32, num_attention_heads=32)),
}


def measured(name) -> dict:
    """"seconds" from the start of a Python to its end, imports and all, and the "peak_ram_gb" (GB)
    of its process; "peak_gb" is what the job's rank would hold."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-m", "_bench.memory_large", name], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, check=True)
    seconds = time.monotonic() - began
    return {"seconds": seconds, **json.loads(ran.stdout.splitlines()[-1])}


def _dry_run(name) -> dict:
    from transformers import LlamaConfig

    from labs.predictions.dryrun import dry_run

    ranks, sizes = JOBS[name]
    run = dry_run(LlamaConfig(**sizes), ranks=ranks, strategy="fsdp2", sequence=4096,
                  precision="mixed", checkpointing="full", backend="nccl")
    return {"peak_ram_gb": _peak_ram() / 1e9, "peak_gb": run.peak.total / 1e9, "note": run.note}


def _peak_ram() -> int:
    """Bytes. getrusage may tell the parent's peak, from before this program was loaded."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    print(json.dumps(_dry_run(sys.argv[1])))
