"""Pipeline schedules as data: legal or not, simulated, and their closed forms."""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.predictions.pipelines.formulas import KINDS, Kind
    from labs.predictions.pipelines.legality import first_illegal, require_legal
    from labs.predictions.pipelines.schedule import Action, B, F, IllegalSchedule, Schedule, W
    from labs.predictions.pipelines.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
    from labs.predictions.pipelines.simulate import CLUSTER, RANK, Timeline, Times

__all__, __getattr__, __dir__ = lazy_exports(__name__)
