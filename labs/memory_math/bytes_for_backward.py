"""Exercise 1.8: the bytes that a forward saves for its backward, measured without the lab."""

import gc
from collections.abc import Callable

import torch

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, require_number, require_signature
from labs.checks.verdicts import Wrong, check, shows
from labs.memory_math import ground_truth
from labs.memory_math.forward_cases import ForwardCase, forward_cases
from labs.memory_math.measurements import allocations_of, left_for_backward
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch

_RULE = ("Each storage counts once, with all its bytes, unless a tensor of `held` lies in it, too: "
         "tensor.untyped_storage().")


@check("1.8")
def check_bytes_for_backward(bytes_for_backward: Callable):
    """bytes_for_backward(forward, held): bytes that forward() saves for backward, without those of
    the tensors in held, against what the allocator says: on the CPU, where it is exact."""
    require_signature(bytes_for_backward, ("forward", "held"))
    # On a rank, because torch's profiler writes to the kernel's own output, which a cell shows.
    [number] = launch(_judge, bytes_for_backward, ranks=1, quiet=True, hang_after=30, verify=False)
    return (f"right to the byte for {counted(number, 'forward')} of random sizes, and afterwards "
            "nothing stays in memory")


def _judge(bytes_for_backward) -> int:
    torch.set_num_threads(1)  # CPU kernels hold a buffer for each thread
    with devices.device():  # tensors are made there
        cases = forward_cases()
    for case in cases:
        want = left_for_backward(case.forward)
        # Allocated and not freed when forward has returned and only the graph is kept: that is
        # what backward needs, whatever views, types and hooks are in between.
        got = require_number(bytes_for_backward(case.forward, list(case.held)), case.name)
        # On a GPU the allocator's blocks are larger than the storages in them.
        storages = len({_address(tensor) for tensor in _saved_by(case.forward)[0]})
        if abs(got - want) > devices.rounding() * storages:
            judge_number(got, want, _causes(case, want), case.name, "bytes", _RULE,
                         source="the allocator says")
        _require_nothing_left(bytes_for_backward, case, want)
    return len(cases)


def _require_nothing_left(bytes_for_backward, case, want):
    # A meter that keeps what it measures makes the next step run out of memory. The graph keeps
    # both hooks and what pack returned: where these keep a tensor of the graph, nothing is freed.
    def run():
        bytes_for_backward(case.forward, list(case.held))
        gc.collect()

    left = sum(allocations_of(run)[0])
    if any(tensor.grad is not None for tensor in case.held):
        raise Wrong(f"{case.name}: it leaves gradients in tensors of `held`",
                    "Backward is not needed: count what forward saves for it.",
                    code="runs_backward")
    if left > want / 2:
        raise Wrong(f"{case.name}: {left:,} bytes are still in memory after it has returned",
                    "The graph keeps pack and what pack returns. Where one of them keeps a tensor "
                    "that keeps the graph, Python's collector does not see the cycle: return "
                    "tensor.detach(), and remember addresses and bytes, not tensors.",
                    code="memory_kept")


def _causes(case: ForwardCase, want: int) -> list[Cause]:
    """What common mistakes lead to, found with hooks on one more forward."""
    saved, output = _saved_by(case.forward)
    found = [
        *_causes_of_held(case, saved), *_causes_of_counting(case, saved),
        Cause("output_size", output.nbytes, "that is the output's size",
              "Backward needs what is in between."),
        Cause("counts_output", want + output.nbytes,
              "that counts the output, which backward does not need", "Count what is saved."),
        Cause("in_mb", want / 1e6, "that is in MB", "Count bytes.")]
    return [cause for cause in found if cause.number]


def _saved_by(forward) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What autograd saves, each time it does, and the output."""
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())  # the tensor itself would keep the graph
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return saved, output


def _causes_of_held(case, saved) -> list[Cause]:
    """Mistakes about what is in memory anyway."""
    trained = {_address(tensor) for tensor in case.held if tensor.requires_grad}
    whole = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    return [
        Cause("counts_in_held", sum(whole.values()), "that counts what is in `held`, too",
              "Parameters and inputs are in memory anyway: leave out their storages."),
        Cause("counts_inputs", sum(nbytes for at, nbytes in whole.items() if at not in trained),
              "that counts inputs", "Leave out all that is in `held`, also what has no gradient."),
        Cause("counts_tensor_whenever_saved", sum(tensor.nbytes for tensor in saved),
              "that counts each tensor whenever it is saved, and what is in `held`", _RULE)]


def _causes_of_counting(case, saved) -> list[Cause]:
    """Mistakes about tensors, storages and their sizes."""
    held = {_address(tensor) for tensor in case.held}
    starts = {tensor.data_ptr() for tensor in case.held}
    own = [tensor for tensor in saved if _address(tensor) not in held]
    first = {_address(tensor): tensor for tensor in reversed(own)}.values()
    once = {(tensor.data_ptr(), tensor.shape): tensor for tensor in own}.values()
    by_start = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in starts}
    return [
        Cause("counts_tensor_whenever_saved", sum(tensor.nbytes for tensor in own),
              "that counts each tensor whenever it is saved",
              "Several operations may save one storage: remember the addresses you have counted."),
        Cause("counts_storage_often_tensor_saved",
              sum(tensor.untyped_storage().nbytes() for tensor in own),
              "that counts a storage as often as a tensor of it is saved",
              "Remember the addresses you have counted."),
        Cause("counts_views", sum(tensor.nbytes for tensor in once),
              "that counts views, not the storages behind them",
              "Views of one storage share its memory, and a small view keeps all of it."),
        Cause("takes_storage_large_first_view", sum(tensor.nbytes for tensor in first),
              "that takes a storage to be as large as the first view of it",
              "tensor.untyped_storage().nbytes() is its size."),
        Cause("takes_address_tensor_for_storage",
              sum(tensor.nbytes for tensor in by_start.values()),
              "that takes the address of a tensor for that of its storage",
              "A view may begin in the middle: take tensor.untyped_storage().data_ptr()."),
        Cause("in_elements", sum(tensor.numel() for tensor in first), "that is in elements",
              "Count bytes."),
        Cause("takes_4_bytes_for_element", 4 * sum(tensor.numel() for tensor in first),
              "that takes 4 bytes for each element",
              "bf16 has 2, a mask 1, an index 8: the storage knows its bytes.")]


def _address(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Korthikanti et al., section 4: what a GPT layer saves, by part, in s·b·h. Together 34.
FORMULA = {"two norms": 4, "attention": 11, "feed-forward": 19, "checkpointed": 2}


@shows("1.8")
def show_saved_parts(bytes_for_backward, layer_activations) -> Picture:
    """What the student's own meter counts in the parts of real blocks, in units of s·b·h, and what
    the formula says of those of GPT-2."""
    batch, sequence, hidden = 1, 128, 256
    unit, rows = batch * sequence * hidden, []
    formula = {"whole": layer_activations(batch, sequence, hidden, 4, True) / unit, **FORMULA}
    for model, parts in ground_truth.block_parts(batch, sequence, hidden).items():
        for part in parts:
            is_gpt2, counted = model == "GPT-2", bytes_for_backward(part.forward, list(part.held))
            rows.append(Bar(f"{model}: {part.name}", counted / unit,
                            formula[part.name] if is_gpt2 else None,
                            None if is_gpt2 or part.name != "two norms" else guessed("1.8"),
                            colour=palette.MEMORY["activations"]))
    off = max(abs(row.measured / row.predicted - 1) for row in rows if row.predicted)
    return bars(rows, "s·b·h", "bytes that your function counts in bf16, attention fused",
                lesson=f"GPT-2's parts are at most {off:.1%} from the formula of Korthikanti et "
                       "al.")
