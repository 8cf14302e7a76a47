"""What the tests of exercises 7.14 to 7.17 share: known schedules as students' functions, and ways
to write one."""

from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import schedules as known


def lists_of(build):
    """A student's function that returns the lists of a known schedule."""
    def answer(ranks, micro_batches, chunks=1):
        sizes = (ranks, micro_batches, chunks) if build is known.interleaved else (ranks,
                                                                                   micro_batches)
        return [[{"F": F, "B": B, "W": W}[action.kind](action.micro_batch, action.stage // ranks)
                 for action in actions] for actions in build(*sizes).ranks]

    return answer


def two(answer):
    """With the signature of an exercise without chunks."""
    return lambda ranks, micro_batches: answer(ranks, micro_batches)


gpipe, one_f_one_b, zb_h1, zb_h2 = map(two, map(lists_of, (
    known.gpipe, known.one_f_one_b, known.zb_h1, known.zb_h2)))
interleaved = lists_of(known.interleaved)


def same_on_all(actions):
    return lambda ranks, micro_batches: [actions(micro_batches)] * ranks


def with_rank(actions):
    return lambda ranks, micro_batches: [actions(ranks, micro_batches, rank)
                                         for rank in range(ranks)]


one_at_a_time = same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B)])


def torchs_text(answer):
    """The same as text cells, with idle slots between."""
    return lambda ranks, micro_batches: [
        [cell for action in actions
         for cell in (f"{rank}{action.kind}{action.micro_batch}", None, "")]
        for rank, actions in enumerate(answer(ranks, micro_batches))]
