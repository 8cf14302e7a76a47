"""Reading a large trace: a recorded one, repeated until it is large enough, read once."""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _bench.progress import done, say

MB = 100
ROOT = Path(__file__).resolve().parents[2]


def run(arguments) -> dict:
    """Returns mb: size of the file; seconds and peak_ram_mb: of a new process that reads it;
    import_ram_mb: of these, what imports take; collectives: how many the trace has."""
    from labs.fsdp_profiling import recorded_runs

    say("recording two ranks' steps, with stacks")
    config = recorded_runs.RunConfig(recorded_runs.preset(), "for the bench", stacks=True)
    [[trace, *_]] = recorded_runs.record_runs([config])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.json")
        say(f"repeating it until it has {arguments.mb or MB} MB")
        repetitions = repeat(trace.path, path, (arguments.mb or MB) * 1e6)
        say("reading it")
        code = "from _bench import trace; import sys; trace.read(sys.argv[1])"
        measured = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT / "scripts",
                                  env={"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
                                  check=True, stdout=subprocess.PIPE, text=True).stdout
        mb = path.stat().st_size / 1e6
    done()
    return {"mb": round(mb, 1), "repetitions": repetitions, **json.loads(measured)}


def repeat(source, target, size: float) -> int:
    """Writes the events of a trace file repeatedly, each time later, until the target has `size`
    bytes. Returns the repetitions. The file is indented, as torch's are."""
    from labs.meters.trace_file import read_events

    header = {}
    events = [event for event in read_events(source, header) if event.get("ph") == "X"]
    first = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] for event in events) - first
    repetitions = 0
    with open(target, "w") as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        while file.tell() < size:
            for number, event in enumerate(events):
                shifted = {**event, "ts": event["ts"] + repetitions * length}
                file.write(",\n" if repetitions or number else "")
                file.write(json.dumps(shifted, indent=2))
            repetitions += 1
        file.write("\n]}\n")
    return repetitions


def read(path) -> None:
    """In a process of its own: prints the seconds and the memory that reading the file takes."""
    from labs.meters.trace_file import load

    before = _peak_mb()
    began = time.perf_counter()
    trace = load(path)
    print(json.dumps({"seconds": round(time.perf_counter() - began, 2),
                      "peak_ram_mb": round(_peak_mb(), 1), "import_ram_mb": round(before, 1),
                      "collectives": len(trace.collectives)}))


def _peak_mb() -> float:
    """Returns this process's peak. Not ru_maxrss on Linux: it includes the parent's memory."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # macOS: in bytes


def table(result) -> str:
    return (f"{result['mb']:.0f} MB, {result['collectives']} collectives: "
            f"{result['seconds']:.1f} s, at most {result['peak_ram_mb']:.0f} MB of RAM, of which "
            f"{result['import_ram_mb']:.0f} MB are torch and Python")
