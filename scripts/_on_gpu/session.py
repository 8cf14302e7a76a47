"""Runs the parts one after the other, the most valuable first, in the minutes that there are."""

import importlib.util
import json
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

from _unattended import machine, runner
from _unattended.folder import commit, results_folder
from _unattended.runner import FAILED, INTERRUPTED, SKIPPED, TIMED_OUT, Result

from _on_gpu import parts, summary
from _on_gpu.parts import ROOT

LAST_SECONDS = runner.GRACE + 5  # kept to end the last part, and for the summary
NEEDED = ("torch", "transformers", "matplotlib", "cloudpickle", "psutil", "tqdm")
NO_GPU = """\
This machine has no GPU that torch can use. `nvidia-smi` shows what the driver sees, and
`python -c "import torch; print(torch.version.cuda)"` whether torch was built for CUDA."""


def run(arguments, chosen=None, root: Path = ROOT) -> int:
    """Runs the parts that were asked for (`chosen`, for tests: other ones); returns the exit code.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{sys.executable} has no {', '.join(missing)}: install what is missing, or set "
              "PYTHON to a Python that has them all.", file=sys.stderr)
        return 2
    found = machine.asked()
    if not found["gpus"]:
        print(NO_GPU, file=sys.stderr)
        return 2
    out = _folder(arguments.out, found)
    wanted = [part for part in chosen or parts.PARTS
              if not arguments.only or part.name in arguments.only]
    print(f"{machine.title(found)}: {len(wanted)} parts in {arguments.minutes:g} minutes at most. "
          f"Results: {out}", flush=True)
    session = _Session(arguments, wanted, out, found, root)
    interrupted = session.run()
    print(f"\n{(out / 'summary.md').read_text()}", flush=True)
    bad = any(result.outcome in (FAILED, TIMED_OUT) for result in session.results)
    return 130 if interrupted else int(bad)


class _Session:
    def __init__(self, arguments, wanted, out, gpus, root):
        self.arguments, self.wanted, self.out, self.root = arguments, wanted, out, root
        self.gpus, self.began, self.results = gpus, time.monotonic(), []
        self.progress = runner.Progress(len(wanted))
        self.log_number = 0

    def run(self) -> bool:
        """Runs all; returns whether it was interrupted. The results are written after each part, so
        that also a machine that is switched off leaves what there was."""
        self._write()
        for number, part in enumerate(self.wanted):
            began = time.monotonic()
            try:
                self.results.append(self._one(part))
            except KeyboardInterrupt:
                seconds = time.monotonic() - began
                self.results.append(Result(part.name, INTERRUPTED, seconds))
                self.results += [Result(later.name, SKIPPED, why="after the interrupt")
                                 for later in self.wanted[number + 1:]]
                self._write()
                return True
            self.progress.end(self.results[-1])
            self._write()
        return False

    @property
    def _seconds_left(self) -> float:
        return self.began + 60 * self.arguments.minutes - time.monotonic() - LAST_SECONDS

    def _one(self, part) -> Result:
        seconds = min(part.limit, self._seconds_left)
        self.progress.begin(part, seconds)
        if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
            return Result(part.name, SKIPPED, why=f"needs {', '.join(missing)}")
        usual = part.seconds / (10 if self.arguments.small else 1)
        if self._seconds_left < usual / 2:
            return Result(part.name, SKIPPED, why=f"takes about {usual:.0f} s, and "
                                                  f"{max(0, self._seconds_left):.0f} s are left")
        before = machine.used_memory()
        result = runner.run(part.name, parts.command(part, self.out, self.arguments.small),
                            self.out / f"{part.name}.log", seconds, self.root, self.progress.tick)
        result.left = machine.memory_left(before)
        return result

    def _write(self):
        seconds = time.monotonic() - self.began
        data = {"machine": self.gpus, "commit": commit(self.root), "small": self.arguments.small,
                "minutes_allowed": self.arguments.minutes, "seconds": seconds,
                "date": date.today().isoformat(),
                "parts": [asdict(result) for result in self.results]}
        (self.out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
        (self.out / "summary.md").write_text(summary.page(data, self.out))


def _folder(asked, found) -> Path:
    out = results_folder(asked, found, ROOT)
    for name in [*summary.READ, *(f"{part.name}.log" for part in parts.PARTS)]:
        (out / name).unlink(missing_ok=True)  # of an earlier session: it would be in the summary
    return out
