"""Exercise 7.15: the same slots, and a peak that does not grow with the micro-batches."""

from labs.checks.verdicts import check
from labs.pipeline_parallel.schedule_targets import SIZES, judge_targets
from labs.predictions.pipelines.formulas import ONE_F_ONE_B


@check("7.15")
def check_one_f_one_b(one_f_one_b):
    """one_f_one_b(ranks, micro_batches): a list of actions for each rank."""
    return judge_targets(
        one_f_one_b, ONE_F_ONE_B, SIZES,
        "An earlier rank needs more forwards before its first backward than a later one: how many "
        "ranks does micro-batch 0 still visit before it is back?",
        "A backward frees what its forward saved. Once a rank has its first gradient, it can run a "
        "backward after each forward.")
