"""Exercise 7.17: a split backward fills the bubble, without more memory than 1F1B."""

from labs.checks.verdicts import check
from labs.pipeline_parallel.schedule_targets import SIZES, judge_targets
from labs.predictions.pipelines.formulas import ZB_H1


@check("7.17")
def check_zb_h1(zb_h1):
    """zb_h1(ranks, micro_batches): a list of actions for each rank, with W."""
    return judge_targets(
        zb_h1, ZB_H1, SIZES,
        "No other rank waits for a W. Keep some of them for the end, where 1F1B's later ranks are "
        "idle: how many can rank r delay?",
        "Activations stay until their W. A rank that delays all of its W holds all micro-batches.")
