"""Numbers that rank 0 reports, and large results on their way: a bar while the launch runs."""

import math
import time
import warnings

from labs.workers import source_lines

LARGE = 50_000_000  # bytes of results from which their arrival is shown


class Progress:
    """series[name] is the list of reported values, in order; "step" among them."""

    def __init__(self, quiet: bool = False):
        self.series = {}
        self.quiet = quiet
        self.changed = time.monotonic()  # when rank 0 last reported anything
        self._bar = self._arrivals = None
        self._began = time.time()
        self._warned = set()

    def take(self, step, total, metrics) -> None:
        self.changed = time.monotonic()
        if step is not None:
            self.series.setdefault("step", []).append(step)
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(value)
            self._check(name, value, step)
        if not self.quiet:
            self._draw(step, total, metrics)

    def _check(self, name, value, step):
        if math.isfinite(value) or name in self._warned:
            return
        self._warned.add(name)
        when = f" at step {step}" if step is not None else ""
        why = (": a learning rate that is too high is the usual cause" if name == "loss" else "")
        warnings.warn(f"{name} is {value}{when} on rank 0, and the run goes on{why}",
                      stacklevel=source_lines.steps_to_caller())

    def _draw(self, step, total, metrics):
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="rank 0", unit="step", leave=False)
            self._bar.start_t = self._began
        numbers = {name: f"{value:.4g}" for name, value in metrics.items()}
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update((self._bar.n + 1 if step is None else step + 1) - self._bar.n)

    def arrived(self, received: int, total: int) -> None:
        """Shows how much of large results is there, in bytes."""
        if self.quiet or total < LARGE:
            return
        if self._arrivals is None:
            from tqdm.auto import tqdm

            self._arrivals = tqdm(desc="results", unit="B", unit_scale=True, leave=False)
        self._arrivals.total = total
        self._arrivals.update(received - self._arrivals.n)

    def close(self) -> None:
        for bar in (self._bar, self._arrivals):
            if bar is not None:
                bar.close()
        self._bar = self._arrivals = None
