"""Exercise 7.14: all ranks at work at once."""

from labs.checks.verdicts import check
from labs.pipeline_parallel.schedule_targets import SIZES, judge_targets
from labs.predictions.pipelines.formulas import GPIPE


@check("7.14")
def check_gpipe(gpipe):
    """gpipe(ranks, micro_batches): a list of actions for each rank."""
    return judge_targets(
        gpipe, GPIPE, SIZES,
        "All forwards first: a rank that has sent micro-batch i on can begin micro-batch i + 1.",
        "Run each backward once.")
