"""Numbers that rank 0 reports: a bar while the launch runs, the series afterwards."""

import time


class Progress:
    """series[name] is the list of reported values, in order; "step" among them."""

    def __init__(self, quiet: bool = False):
        self.series = {}
        self.quiet = quiet
        self._bar = None
        self._began = time.time()

    def take(self, step, total, metrics) -> None:
        if step is not None:
            self.series.setdefault("step", []).append(step)
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(value)
        if not self.quiet:
            self._draw(step, total, metrics)

    def _draw(self, step, total, metrics):
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="rank 0", unit="step", leave=False)
            self._bar.start_t = self._began
        self._bar.n = self._bar.n + 1 if step is None else step + 1
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in metrics.items()})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
