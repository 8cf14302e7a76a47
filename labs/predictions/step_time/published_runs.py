"""Published training runs, from a JSON file of rows to runs that the model can predict.

The file is {"about": ..., "rows": [...]}; its `units` say in which unit each figure is. A row that
cannot be predicted is excluded by a rule on its own fields, and the rule is kept as its reason.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from labs.predictions.code_bases import CodeBase, code_base
from labs.predictions.step_time.efficiency import flops_per_token, gpt_flops_per_token
from labs.predictions.step_time.row_fields import Excluded, read_run
from labs.predictions.step_time.training_run import TrainingRun

ROWS = Path(__file__).with_name("published_runs.json")
_CONTRADICTION = 0.05


class RowsError(ValueError):
    """The file of rows cannot be read; one sentence says why."""


@dataclass(frozen=True)
class PublishedRun:
    """A row. seconds: of a step, as published; run: what the model predicts from. Both are None
    if the row is excluded, and `excluded` says why."""

    id: str
    model: str
    code_base: CodeBase
    sequence: int
    seconds: float | None = None
    run: TrainingRun | None = None
    excluded: str = ""

    @property
    def key(self) -> tuple:
        """What two rows share if they publish the same run, whatever their ids."""
        return self.model, self.run


def error_percent(predicted: float, published: float) -> float:
    """Predicted over published seconds, less 100 %: above 0 where the prediction is too slow."""
    return 100 * (predicted / published - 1)


def load_published_runs(path: str | Path = ROWS) -> list[PublishedRun]:
    """Every row of the file, in its order. Raises RowsError."""
    return [_published(row) for row in _rows(path)]


def _rows(path) -> list[dict]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise RowsError(f"{path} is not JSON: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise RowsError(f'{path} has no rows: expected {{"rows": [{{"id": ..., ...}}, ...]}}')
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise RowsError(f"row {number} of {path} is not an object with named fields")
    return rows


def _published(row) -> PublishedRun:
    found = dict(id=str(row.get("id")), model=str(row.get("model")),
                 code_base=code_base(str(row.get("source", ""))), sequence=row.get("seq_len"))
    try:
        if row.get("kind") != "measured":
            raise Excluded(f"kind is {row.get('kind')!r}, not 'measured'")
        run = read_run(row, found["code_base"])
        return PublishedRun(**found, seconds=_seconds(row, run), run=run)
    except Excluded as reason:
        return PublishedRun(**found, excluded=str(reason))


def seconds_by_figure(row: dict, run: TrainingRun) -> dict[str, float]:
    """Field -> seconds of a step that follow from it, for the figures that the row prints."""
    found = {"iter_time_s": row.get("iter_time_s"),
             "tokens_per_s_per_gpu": _from_tokens(row, run), "mfu": _from_mfu(row, run),
             "tflops_per_gpu": _from_tflops(row, run)}
    return {name: seconds for name, seconds in found.items() if seconds}


def _seconds(row, run) -> float:
    """Published seconds of a step. What was measured comes before shares of a peak and FLOP/s,
    because these depend on who counts; two measured figures must agree."""
    found = seconds_by_figure(row, run)
    if not found:
        raise Excluded("has no time of a step, throughput or utilization")
    measured = [found[name] for name in ("iter_time_s", "tokens_per_s_per_gpu") if name in found]
    if len(measured) == 2 and abs(measured[0] / measured[1] - 1) > _CONTRADICTION:
        raise Excluded(f"iter_time_s and tokens_per_s_per_gpu differ by over {_CONTRADICTION:.0%}")
    return next(iter(found.values()))


def _from_tokens(row, run) -> float | None:
    rate = row.get("tokens_per_s_per_gpu")
    return run.step_tokens / run.gpus / rate if rate else None


def _from_mfu(row, run) -> float | None:
    """MFU is a share of the peak of the precision that is used: of 8 bits in a run with FP8."""
    if not row.get("mfu"):
        return None
    achieved = row["mfu"] / 100 * run.gpu.flops * (2 if run.fp8 else 1)
    return run.step_tokens * _model_flops(row, run) / run.gpus / achieved


def _from_tflops(row, run) -> float | None:
    """FLOP/s are the model's, unless a note says that Megatron-LM counted recomputation too."""
    if not row.get("tflops_per_gpu"):
        return None
    flops = (gpt_flops_per_token(run.layers, run.hidden, run.vocabulary, run.sequence, "full")
             if "counts activation recompute" in str(row.get("notes")) else _model_flops(row, run))
    return run.step_tokens * flops / run.gpus / (row["tflops_per_gpu"] * 1e12)


def _model_flops(row, run) -> float:
    """FLOPs per token: from the parameters; product by product where a row has no such number."""
    sizes = run.layers, run.hidden
    if row.get("n_params"):
        return flops_per_token(row["n_params"], *sizes, run.sequence)
    return gpt_flops_per_token(*sizes, run.vocabulary, run.sequence)
