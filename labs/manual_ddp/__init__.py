"""Notebook 02: data parallelism by hand, checked against the reference, compared with torch's DDP.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.comparison import model_of
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.manual_ddp.accumulate import check_accumulate
    from labs.manual_ddp.average_gradients import check_average_gradients, show_gradients
    from labs.manual_ddp.bucket import check_bucket
    from labs.manual_ddp.combine import check_combine, show_combine
    from labs.manual_ddp.ddp import check_ddp
    from labs.manual_ddp.make_buckets import check_make_buckets, explore_buckets
    from labs.manual_ddp.manual_ddp import check_manual_ddp
    from labs.manual_ddp.measurement import check_measurement
    from labs.manual_ddp.no_sync import check_no_sync, show_accumulation
    from labs.manual_ddp.overlap import check_overlap, show_in_flight, show_training
    from labs.manual_ddp.ready_order import check_ready_order, show_starts
    from labs.manual_ddp.scaffold import BucketedWrapper, Wrapper
    from labs.manual_ddp.variants import (
        compare,
        show_bytes,
        show_calls,
        show_phases,
        show_throughput,
        show_timelines,
    )
    from labs.training.presets import preset

__all__, __getattr__, __dir__ = lazy_exports(__name__)
