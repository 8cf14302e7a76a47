"""Notebook 02: data parallelism by hand, checked against the reference, compared with torch's DDP.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.exercises.comparison import model_of
    from labs.manual_ddp.charts import (
        explore_buckets,
        show_accumulation,
        show_bytes,
        show_calls,
        show_combine,
        show_gradients,
        show_in_flight,
        show_phases,
        show_starts,
        show_throughput,
        show_timelines,
        show_training,
    )
    from labs.manual_ddp.checks.accumulate import check_accumulate
    from labs.manual_ddp.checks.average_gradients import check_average_gradients
    from labs.manual_ddp.checks.broadcast_state import check_broadcast_state
    from labs.manual_ddp.checks.buckets import check_make_buckets
    from labs.manual_ddp.checks.combine import check_combine
    from labs.manual_ddp.checks.manual_ddp import check_manual_ddp
    from labs.manual_ddp.checks.no_sync import check_no_sync
    from labs.manual_ddp.checks.one_bucket import check_bucket
    from labs.manual_ddp.checks.overlap import check_overlap
    from labs.manual_ddp.checks.ready_order import check_ready_order
    from labs.manual_ddp.scaffold import BucketedWrapper, Wrapper
    from labs.manual_ddp.variants import compare
    from labs.training.presets import preset
    from labs.training.strategies.torch_strategies import torch_ddp

__all__, __getattr__, __dir__ = lazy_exports(__name__)
