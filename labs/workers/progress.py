"""Numbers that rank 0 reports, and large results on their way: a bar while the launch runs."""

import math
import time
import warnings

from labs.workers import source_lines

LARGE = 50_000_000  # bytes of results from which their arrival is shown


class ProgressBars:
    """series[name] is the list of reported values, in order; "step" among them."""

    def __init__(self, quiet: bool = False):
        self.series: dict[str, list[float]] = {}
        self.quiet = quiet
        self.changed = time.monotonic()  # when rank 0 last reported anything
        self._reports = self._arrivals = None  # tqdm's bars
        self._began = time.time()
        self._warned = set()

    def add(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """Takes one report of rank 0."""
        self.changed = time.monotonic()
        if step is not None:
            self.series.setdefault("step", []).append(step)
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(value)
            self._warn_if_not_finite(name, value, step)
        if not self.quiet:
            self._show(step, total, metrics)

    def show_arrival(self, received: int, total: int) -> None:
        """Shows how much of large results has arrived, in bytes."""
        if self.quiet or total < LARGE:
            return
        if self._arrivals is None:
            self._arrivals = _bar(desc="results", unit="B", unit_scale=True)
        self._arrivals.total = total
        self._arrivals.update(received - self._arrivals.n)

    def close(self) -> None:
        for bar in (self._reports, self._arrivals):
            if bar is not None:
                bar.close()

    def _warn_if_not_finite(self, name, value, step):
        if math.isfinite(value) or name in self._warned:
            return
        self._warned.add(name)
        when = f" at step {step}" if step is not None else ""
        why = ": a learning rate that is too high is the usual cause" if name == "loss" else ""
        warnings.warn(f"{name} is {value}{when} on rank 0, and the run goes on{why}",
                      stacklevel=source_lines.steps_to_caller())

    def _show(self, step, total, metrics):
        bar = self._reports
        if bar is None:
            bar = self._reports = _bar(desc="rank 0", unit="step", total=total)
            bar.start_t = self._began  # the launch, not the first report, began the first step
        bar.set_postfix({name: f"{value:.4g}" for name, value in metrics.items()}, refresh=False)
        bar.update(1 if step is None else step + 1 - bar.n)


def _bar(**options):
    from tqdm.auto import tqdm  # in a notebook it needs Jupyter

    return tqdm(leave=False, **options)
