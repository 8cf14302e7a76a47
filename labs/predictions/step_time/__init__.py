"""How long a training step takes: FLOPs, memory traffic, and communication with overlap."""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.predictions.step_time.constants import FITTED, Constants
    from labs.predictions.step_time.published_runs import (
        PublishedRun,
        RowsError,
        error_percent,
        load_published_runs,
    )
    from labs.predictions.step_time.step import StepTime, step_time
    from labs.predictions.step_time.training_run import TrainingRun

__all__, __getattr__, __dir__ = lazy_exports(__name__)
