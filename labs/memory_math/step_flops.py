"""Exercise 1.5: the FLOPs of a step, with and without checkpointing, as PyTorch runs it."""

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, require_signature
from labs.checks.verdicts import check, shows
from labs.memory_math.ground_truth import counted_step
from labs.memory_math.scaffold import CheckpointingCost
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.training.memory_categories import Memory


@check("1.5")
def check_step_flops(step_flops):
    """FLOPs of a step against those that torch counts in real blocks of linear layers and a
    head."""
    require_signature(step_flops, ("blocks", "last", "head", "tokens", "checkpointing"))
    rng = new_generator()
    for checkpointing in (False, True):
        # Random widths: the count holds for any matrices, and no constant passes.
        width = rng.randint(3, 30)
        widths = (width, *(rng.randint(3, 30) for _ in range(rng.randint(1, 3))), width)
        # At least 5: with 2 or 3, a count without tokens is the value of another cause.
        tokens = rng.randint(5, 50)
        counted = counted_step(widths, rng.randint(2, 4), rng.randint(5, 40), tokens,
                               checkpointing)
        what = (f"{counted.blocks} parameters in blocks, {counted.last} of them in last matrices, "
                f"{counted.head} in the head, {tokens} tokens, "
                f"{'with' if checkpointing else 'without'} checkpointing")
        judge_number(step_flops(*counted[:3], tokens, checkpointing), counted.flops,
                     _causes(counted, tokens, checkpointing), what, "FLOPs",
                     "2 per parameter and token in forward, twice that in backward.",
                     source="torch counts")
    return ("the FLOPs that torch counts in real layers: 6 per parameter and token, and 2 more for "
            "each that is computed again")


def _causes(counted, tokens, checkpointing) -> list[Cause]:
    # Multiplications of forward: one for each parameter of a matrix and token.
    blocks, last, head = (size * tokens for size in counted[:3])
    # torch stops recomputing a block when it has what backward needs: not its last product.
    once, again = blocks + head, blocks - last  # multiplications of forward, and of recomputing
    wrong = [
        Cause("nothing_computed_again", 6 * once, "nothing is computed again",
              "Checkpointing runs a block a second time."),
        Cause("all_products_again", 8 * once, "as if every product of forward ran again",
              "Neither the head's nor a block's last one does."),
        Cause("last_product_again", 6 * once + 2 * blocks,
              "as if a block's last product ran again",
              "torch stops as soon as it has what backward needs: subtract `last`."),
        Cause("head_product_again", 6 * once + 2 * (again + head),
              "as if the head's product ran again",
              "The head is in no block: nothing of it is dropped."),
        Cause("step_done_twice", 12 * once, "the step is done twice",
              "Only blocks run again, and only forward."),
        Cause("backward_computed_again", 6 * once + 6 * again, "backward is computed again",
              "Only forward runs again."),
    ] if checkpointing else [
        Cause("forward_runs_twice", 6 * once + 2 * again,
              "forward runs twice, though nothing is dropped here",
              "Recompute only where `checkpointing` is True."),
        Cause("forward_runs_twice", 8 * once, "forward runs twice, though nothing is dropped here",
              "Recompute only where `checkpointing` is True.")]
    backward = "Backward makes two products for each one of forward: for the input and the weight."
    return [*wrong, Cause("forward_alone", 2 * once, "that is forward alone", backward),
            Cause("backward_like_forward", 4 * once, "forward and backward count as much",
                  backward),
            Cause("backward_like_forward", 4 * once + 2 * again * checkpointing,
                  "forward and backward count as much", backward),
            Cause("head_missing", 6 * blocks + 2 * again * checkpointing, "the head is missing",
                  "Its product runs once, like a block's."),
            Cause("last_matrices_counted_twice", counted.flops + 6 * last,
                  "last matrices are counted twice", "`last` is a part of `blocks`."),
            Cause("tokens_missing", counted.flops / tokens, "tokens are not counted",
                  "Each token goes through every matrix."),
            Cause("one_flop_for_two", counted.flops / 2,
                  "a multiplication and an addition are two operations", "2 per parameter.")]


@shows("1.5")
def show_checkpointing_cost(cost: CheckpointingCost, step_flops) -> Picture:
    """A step with checkpointing as a multiple of one without: FLOPs counted, time measured."""
    blocks, last, head = cost.matrices

    def formula(last) -> float:
        return step_flops(blocks, last, head, 1, True) / step_flops(blocks, last, head, 1, False)

    guess, flops = guessed("1.5"), cost.flops
    rows = [Bar("blocks recomputed in full", flops[2] / flops[0], formula(0), guess, palette.PLAIN),
            Bar("as torch does it", flops[1] / flops[0], formula(last), guess, palette.PLAIN),
            Bar(f"time on this {'CPU' if cost.device == 'cpu' else 'GPU'}",
                cost.seconds[1] / cost.seconds[0], colour=palette.MUTED)]
    title = "the step without checkpointing (FLOPs counted, time measured)"
    if cost.device != "cpu":  # a CPU's seconds differ from run to run, and are no GPU's
        title = "{}\n{} without, {} with".format(title, *cost.timings)
    return bars(rows, "×", title, lesson=(
        f"Checkpointing costs {rows[1].measured - 1:.0%} more FLOPs, and here "
        f"{rows[2].measured - 1:+.0%} time"))


@shows("1.5")
def show_checkpointing_memory(cost: CheckpointingCost) -> Picture:
    """Activations at the end of forward without and with checkpointing, measured and predicted."""
    names = ("nothing recomputed", "checkpointing")
    return memory_bars([MemoryRow(name, Memory(activations=kept), predicted)
                        for name, kept, predicted in zip(names, cost.kept, cost.predicted,
                                                         strict=True)],
                       "of activations at the end of forward", lesson=(
                           f"Checkpointing keeps {cost.kept[1] / cost.kept[0]:.0%} of the "
                           "activations"))
