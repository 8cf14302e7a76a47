"""Exercise 7.16: several chunks of the model on each rank."""

from labs.checks.verdicts import check
from labs.pipeline_parallel.schedule_targets import judge_targets
from labs.predictions.pipelines.formulas import INTERLEAVED

# (ranks, micro-batches, chunks); the micro-batches are a multiple of the ranks. One chunk is 1F1B.
SIZES = ((4, 8, 2), (2, 4, 3), (3, 6, 2), (4, 4, 3), (3, 9, 4), (4, 12, 1), (1, 3, 2), (2, 2, 2),
         (1, 1, 3), (6, 12, 2))


@check("7.16")
def check_interleaved(interleaved):
    """interleaved(ranks, micro_batches, chunks): a list of actions for each rank."""
    return judge_targets(
        interleaved, INTERLEAVED, SIZES,
        "Send as many micro-batches as there are ranks through chunk 0, the same ones through "
        "chunk 1, and so on; then the next group. Backwards go through the chunks in reverse.",
        "Begin to alternate forwards and backwards as soon as the last chunk's first gradient can "
        "be there.")
