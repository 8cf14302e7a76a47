"""Pictures of training under a memory limit: what runs out of memory, checkpointing, offload, and
the largest models that fit."""

from collections.abc import Callable
from dataclasses import replace

from torch.utils.flop_counter import FlopCounterMode

from labs.checks.comparison import Comparison, compare
from labs.checks.gpu_notes import (
    ROUNDS,
    SHARED_CARD,
    allocators,
    below,
    on_gpus_of_their_own,
    speeds,
)
from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.fsdp import memory_limits
from labs.fsdp.comparisons import peaks
from labs.fsdp.cost import UTILISATION
from labs.fsdp.memory_limits import LargestModel, size_text
from labs.pictures import marks
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.step_time.constants import HOST_OPTIMIZER_BYTES, MEMORY_SHARE
from labs.training.memory_categories import GB
from labs.words import listed
from labs.workers import cuda, devices
from labs.workers.progress import status


@shows("4.1")
def show_training_under_limit(chosen: dict[str, Callable], limit: float,
                      layers: int | None = None) -> Picture:
    """Trains each strategy (by name) on ranks that get no more than `limit` bytes, and draws its
    memory; one that ran out of memory, with what it would have needed. layers: of the model, by
    default those of this machine's preset."""
    layers = layers or memory_limits.preset().layers
    rows = [_row(name, strategy, limit, layers) for name, strategy in chosen.items()]
    size = f"{memory_limits.parameters(layers) / 1e6:.1f} M parameters"
    model = f"{memory_limits.preset().ranks} ranks, {layers} layers, {size}"
    note = next((note for _, note in rows if note), "")
    return memory_bars([row for row, _ in rows], f"of one rank at the peak; {model}",
                       [(limit, f"limit, {size_text(limit)}")],
                       "GB" if limit >= GB else "MB", note, _who_trained([row for row, _ in rows]))


def _who_trained(rows) -> str:
    """Who ran out of memory under the limit, and who did not."""
    failed = [row.name for row in rows if row.out_of_memory]
    trained = [row.name for row in rows if row.measured is not None and not row.out_of_memory]
    words = [f"{listed(failed)} out of memory"] * bool(failed)
    words += [f"{listed(trained)} trained"] * bool(trained)
    return "Under the same limit: " + ", ".join(words) if words else ""


def _row(name, strategy, limit, layers) -> tuple[MemoryRow, str]:
    """Returns a strategy's row, and why it ran out of memory, if it did."""
    predicted = memory_limits.predicted_peak(name, layers)
    with status(f"{name} under {size_text(limit)} a rank"):
        held, short = memory_limits.train_recorded(strategy, layers, limit)
    if held is None:
        why = f"{name}: OutOfMemory: a rank {short}"
    elif not memory_limits.can_limit() and predicted.total > limit:
        why = f"{name}: no limit can be set here, so this is predicted"
    else:
        return MemoryRow(name, held, predicted), ""
    return MemoryRow(name, predicted=predicted, out_of_memory=True, limit=limit), why


@shows("4.4")
def compare_strategies(chosen: dict[str, Callable], layers: int | None = None) -> Comparison:
    """Trains the same model under each strategy (by name), without a limit; times it, and counts
    the arithmetic of a step."""
    return compare(chosen, memory_limits.preset(layers), rounds=3, observe=count_operations,
                   quiet=True)


@shows("4.4")
def show_memory_and_arithmetic(compared: Comparison) -> Picture:
    """Draws peak by category, and operations of a step, with what checkpointing saved and cost."""
    found = list(compared.results.values())
    work = [max(r.observed) for r in found]
    unit, size = ("TFLOP", 1e12) if max(work) >= 1e12 else ("GFLOP", 1e9)
    work = Panel("arithmetic", f"{unit} per step and rank", work, size)
    return side_by_side(list(compared.results), [peaks(found, _predicted(compared)), work],
                        below(_bargain(compared.results), allocators(compared)),
                        _least_memory(compared.results))


def _least_memory(found) -> str:
    """Which strategy has the lowest peak, against the first one."""
    peaks_of = {name: one.report.step_peak.total for name, one in found.items()}
    first, least = next(iter(peaks_of)), min(peaks_of, key=peaks_of.get)
    work = {name: max(one.observed) for name, one in found.items()}
    return (f"{least}: {peaks_of[least] / peaks_of[first]:.0%} of the memory of {first}, "
            f"{work[least] / work[first]:.0%} of its arithmetic")


def _bargain(found) -> str:
    """Memory and arithmetic with checkpointing, against without."""
    without, with_ = found.get("FSDP"), found.get("FSDP + checkpointing")
    if without is None or with_ is None:
        return ""
    usual, least = without.report.step_peak, with_.report.step_peak
    kept, fewer = (_activations(one.report) for one in (without, with_))
    more = max(with_.observed) / max(without.observed)
    # Below 4/3: forward is a third of a step's arithmetic, and checkpointing repeats not all of it.
    if not (fewer < kept and 1 < more < 4 / 3):
        raise RuntimeError("checkpointing should hold fewer activations, and compute up to a third "
                           f"more: {fewer} and {kept} bytes, {more:.2f}x")
    # On many GPUs the peak may be in the optimizer's step, when there are none.
    when = "at the peak" if least.activations else "at the peak of backward"
    return (f"{_moments(found)}.\nCheckpointing, {when}: {kept / fewer:.1f}× less for activations, "
            f"{usual.total / least.total:.1f}× less in all, for {more:.2f}× the arithmetic")


def _activations(report) -> float:
    """Bytes of activations at the peak of a step; of backward, where the step's peak is later."""
    return report.step_peak.activations or report.peaks["backward"].activations


def _predicted(compared) -> list[float | None]:
    size = compared.preset
    return [memory_limits.predicted_peak(name, size.layers, size.ranks).total
            if name in memory_limits.FORMULAS else None for name in compared.results]


@shows("CPU offload")
def show_offload(without: Callable, offloaded: Callable, layers: int | None = None) -> Table:
    """Returns a table of what CPU offload keeps on the device and moves to the host: parameters,
    gradients and optimizer state are there, and are copied for each gather and reduction. On GPUs
    also what is pinned for that, and what it costs in speed."""
    on_gpu = devices.gpus() > 0
    compared = compare({"FSDP": without, "offload": offloaded}, memory_limits.preset(layers),
                       rounds=ROUNDS * on_gpu, observe=pinned_bytes, quiet=True)
    usual, moved = compared.results["FSDP"], compared.results["offload"]
    peak = moved.report.step_peak
    host = _states(usual.report.phases["backward"])  # on a GPU offload's own report lacks them
    sent = sum(moved.bytes.values()) / compared.preset.ranks
    rows = [("on the host", _text(host), "parameters, gradients, optimizer state"),
            ("on a GPU", _text(peak.total - _states(peak)), "activations, gathered parameters"),
            ("over PCIe in a step", _text(sent),
             "a shard for each gather, and its gradient back")]
    if on_gpu:
        rows += [("pinned for that", _text(max(moved.observed)),
                  "of the host's memory, each tensor rounded up to a power of two"),
                 ("tokens/s of all ranks", f"{compared.tokens_per_second('offload'):,.0f}",
                  f"without offload {compared.tokens_per_second('FSDP'):,.0f}"),
                 ("time of a step", *moved.slower_than(usual).split(" ", 1))]
    note = ("On CPU ranks host and device are the same memory: this table sorts what was measured, "
            "and nothing is sent.")
    return Table("One rank with CPU offload", ("", "", ""), rows, left=0,
                 note=SHARED_CARD * (not on_gpus_of_their_own(compared.preset)) if on_gpu else note)


def _text(nbytes) -> str:
    return f"{nbytes / GB:.2f} GB" if nbytes >= GB else f"{nbytes / 1e6:.1f} MB"


@shows("CPU offload")
def show_offload_on_gpus(psi: float = 6.74e9, ranks: int = 8, tokens: int = 4096) -> Table:
    """Returns a table: how long the bytes of CPU offload take over each GPU's PCIe, in one step of
    a model with `psi` parameters, and how long the step computes meanwhile."""
    nbytes = 3 * 4 * psi / ranks  # a shard in fp32 for two gathers, and its gradient back
    rows = []
    for gpu in hardware.GPUS.values():
        sent = nbytes / gpu.pcie
        computes = 6 * psi * tokens / (UTILISATION * gpu.flops)
        rows.append((gpu.name, f"{gpu.pcie / GB:g}", f"{sent:.2f}", f"{computes:.2f}",
                     f"{sent / computes:.0%}"))
    return Table(f"{psi / 1e9:.2f} billion parameters on {ranks} ranks, {tokens:,} tokens each: "
                 f"{nbytes / GB:.1f} GB of offload a step and rank, computed",
                 ("GPU", "PCIe, GB/s", "s on PCIe", "s computing", "share"), rows,
                 note=f"Computing: 6 operations a parameter and token, at {UTILISATION:.0%} of the "
                      "peak in 16 bits. AdamW on the host comes in addition: "
                      f"{_host_seconds(psi):.1f} s on a DGX A100, whose ranks share its memory.")


def _host_seconds(psi) -> float:
    """Seconds of AdamW on the host of eight A100s, for all of a model's parameters."""
    return HOST_OPTIMIZER_BYTES * psi / (hardware.A100.host_bandwidth * MEMORY_SHARE)


def _states(held) -> float:
    return held.parameters + held.gradients + held.optimizer_state


@shows("4.4")
def show_largest_models(compared: Comparison, *found: LargestModel) -> Picture:
    """Draws memory of the same model, and the largest model that fits."""
    names = list(compared.results)
    by_name = {one.name: one for one in found}
    base, guess = by_name.get("DDP", found[0]), guessed("4.4")
    guesses = [guess and guess * _size(base, "predicted") if "checkpointing" in name else None
               for name in names]
    largest = Panel("largest that fits", "M parameters",
                    [_size(by_name.get(name), "found") for name in names], 1e6,
                    [_size(by_name.get(name), "predicted") for name in names], guesses,
                    missing="not tried")
    held = peaks(list(compared.results.values()), _predicted(compared))
    limit = _with_limit(held, base.limit)
    sizes = {name: value for name, value in zip(names, largest.values, strict=True) if value}
    most = max(sizes, key=sizes.get, default="")
    return side_by_side(names, [limit, largest], _moments(compared.results)
                        + "; ✗: more than the limit" * bool(limit.out_of_memory),
                        f"The largest model that fits: {most}, {sizes[most] / 1e6:.3g} M "
                        "parameters" if sizes else "", _times_answered(guess, sizes))


def _times_answered(guess, sizes) -> str:
    """The guess, a multiple of the largest model under DDP, answered; "" where one is missing."""
    name = next((name for name in sizes if "checkpointing" in name), "")
    if not name or "DDP" not in sizes:
        return ""
    return marks.answered(guess, sizes[name] / sizes["DDP"], "times")


def _moments(found) -> str:
    """At which moments of a step the peaks are: bars differ in what exists by then."""
    freed = [name for name, one in found.items()
             if one.report.step_peak.activations < 0.01 * one.report.step_peak.total]
    words = "Measured without a limit, each bar at the moment at which its rank holds most"
    if freed and len(freed) < len(found):
        words += (f": {listed(freed)} in the optimizer's step, when activations are freed, the "
                  "others in backward, with the gradients that are ready by then")
    return below(words)


def _with_limit(panel, limit) -> Panel:
    over = tuple(place for place, held in enumerate(panel.values) if held.total > limit)
    return replace(panel, limit=limit, out_of_memory=over)


def _size(one, which) -> int | None:
    layers = one and getattr(one, which)  # 0: not even one fits
    return memory_limits.parameters(layers) if layers else layers


@shows("4.4")
def show_summary(compared: Comparison, *found: LargestModel) -> Table:
    """Returns the numbers of `show_largest_models` as a table."""
    by_name = {one.name: one for one in found}
    rows = []
    for name, result in compared.results.items():
        one = by_name.get(name)
        rows.append((name, f"{result.report.step_peak.total / 1e6:,.1f}",
                     f"{max(result.observed) / 1e9:,.1f}",
                     f"{compared.tokens_per_second(name):,.0f}",
                     *(f"{_size(one, which) / 1e6:.2f}" if _size(one, which) else "–"
                       for which in ("predicted", "found")),
                     f"{abs(one.off):.0%}" if one and one.off is not None else "–"))
    head = ("", "MB at the peak", "GFLOP", "tokens/s here", "predicted, M", "found, M", "apart")
    return Table(f"{compared.parameters / 1e6:.1f} M parameters on {compared.preset.ranks} ranks, "
                 f"and the largest model under {size_text(found[0].limit)} a rank", head, rows,
                 note=speeds(compared))


def count_operations(module, optimizer, batch) -> int:
    """On a rank: returns the operations of matrix products in forward and backward of one batch."""
    with FlopCounterMode(display=False) as counter:
        module(**batch).loss.backward()
    optimizer.zero_grad()
    return counter.get_total_flops()


def pinned_bytes(module, optimizer, batch) -> int:
    """On a rank: returns the bytes of pinned memory; a CPU has no need of it."""
    return 0 if devices.device().type == "cpu" else cuda.pinned_memory()
