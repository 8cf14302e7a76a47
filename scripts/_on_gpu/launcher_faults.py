"""The launcher's faults on this machine's GPUs (tests/faults/on_gpus.py), without pytest: whether
each is named in time, whether GPU memory or processes are left, whether the next launch works."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from _unattended import machine

TESTS = Path(__file__).resolve().parents[2] / "tests"


def one(fault) -> dict:
    """Runs one fault; returns its row."""
    import leaks
    from faults import faulty, on_gpus

    from labs import launch

    before, began = machine.used_memory(), time.monotonic()
    shown = on_gpus.shown(fault)
    seconds = time.monotonic() - began
    missing = [piece for piece in fault.message_parts if piece not in shown]
    left = machine.memory_left(before)
    gone = leaks.until(lambda: not leaks.workers_of(os.getpid()), 5)
    works = launch(faulty.next_launch, ranks=2, quiet=True) == [2.0, 2.0]
    wrong = [word for word, is_wrong in (
        (f"does not say {missing}", missing), (f"late: {seconds:.0f} s", seconds > fault.within),
        (f"{left} MiB left", left), ("processes left", not gone), ("no next launch", not works))
        if is_wrong]
    return {"fault": fault.name, "wrong": wrong, "seconds": seconds, "memory_left_mib": left,
            "shown": shown}


def main(arguments: list) -> int:
    """Runs all faults that this machine can have; writes the rows; 1 if any is wrong."""
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.launcher_faults", description=__doc__)
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="without those that take seconds")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
    from faults import faulty, on_gpus

    from labs import launch
    from labs.workers import devices

    plan = devices.plan(2)
    print(plan.reason)
    launch(faulty.next_launch, ranks=2, quiet=True)  # the fork server imports torch once
    rows = []
    for fault in on_gpus.FAULTS:
        if options.small and fault.function in on_gpus.SECONDS:
            continue
        why = on_gpus.cannot(fault)
        rows.append({"fault": fault.name, "skipped": why} if why else one(fault))
        state = why or "; ".join(rows[-1]["wrong"]) or "as it should be"
        print(f"{fault.name:44s} {state}", flush=True)
        if rows[-1].get("wrong"):
            print("    " + rows[-1]["shown"].replace("\n", "\n    "), flush=True)
        Path(options.out).write_text(json.dumps({"backend": plan.backend, "rows": rows}, indent=1))
    bad = [row["fault"] for row in rows if row.get("wrong")]
    print(f"not as they should be: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
