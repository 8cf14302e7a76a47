"""The pictures of training under a limit: what dies, what each rung saves and costs, how large a
model fits."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp import limits, measuring
from labs.fsdp.limits import Largest
from labs.pictures import fsdp as pictures
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.tables import Table

LAYERS = 8  # of the model that all rungs train


@shows("4.1")
def under_limit(variants: dict, limit: float, layers: int = LAYERS):
    """Trains each strategy (name -> strategy) on ranks that really get no more than `limit`
    bytes: those that survive with what they held, those that died with what they would need."""
    rows = [_row(name, strategy, limit, layers) for name, strategy in variants.items()]
    size = f"{limits.parameters(layers) / 1e6:.1f} M parameters"
    model = f"{limits.RANKS} ranks, {layers} layers, {size}"
    said = next((row[1] for row in rows if row[1]), "")
    return memory_bars([row[0] for row in rows], f"of one rank at the peak; {model}",
                       [(limit, f"limit, {limit / 1e6:g} MB")], "MB", said)


def _row(name, strategy, limit, layers) -> tuple:
    """(Row, what the rank that died said)."""
    predicted, died = limits.predicted(name, layers), ""
    if limits.can_limit():
        short = limits.shortage(strategy, layers, limit)
        died = f"{name}: {_said(short)}" if short else ""
    else:
        died = f"{name}: no limit can be set here, so this is predicted" * (predicted.total > limit)
    if died:
        return MemoryRow(name, predicted=predicted, out_of_memory=True, limit=limit), died
    report = measuring.measure({name: strategy}, limits.size(layers), rounds=0, tries=1)
    return MemoryRow(name, report.results[name].report.step_peak, predicted), ""


def _said(short) -> str:
    asked = f" and asked for {short.asked / 1e6:.1f} MB more" if short.asked else ""
    held = f"held {short.held / 1e6:.0f} MB{asked}" if short.held else "asked for more"
    return f"a rank {held}: OutOfMemory"


@shows("4.4")
def compare(rungs: dict, layers: int = LAYERS) -> measuring.Measured:
    """Trains the same model on every rung (name -> strategy), without a limit, and times it."""
    return measuring.measure(rungs, limits.size(layers), rounds=5, tries=1)


@shows("4.4")
def show_rungs(compared):
    """Peak by category and time of a step; what checkpointing saved and cost, in a sentence."""
    found = compared.results
    panels = [_peaks(compared, None), pictures.Panel(
        "time", "ms per step", [r.seconds for r in found.values()], 1e-3)]
    return pictures.side_by_side(list(found), panels, _bargain(found))


def _bargain(found) -> str:
    """Memory at the peak and seconds, with checkpointing against without."""
    without, with_ = found.get("FSDP"), found.get("FSDP + checkpointing")
    if without is None or with_ is None:
        return ""
    usual, least = without.report.step_peak, with_.report.step_peak
    return (f"Checkpointing, at the peak: {usual.activations / least.activations:.1f}× less for "
            f"activations, {usual.total / least.total:.1f}× less in all. "
            f"Time of a step: {with_.slower(without)}")


def _peaks(compared, limit):
    return pictures.Panel("peak of a step", "MB",
                          [r.report.step_peak for r in compared.results.values()], 1e6,
                          [limits.predicted(name, compared.size.layers).total
                           if name in limits.FORMULAS else None for name in compared.results],
                          limit=limit, died=_dead(compared, limit))


def _dead(compared, limit) -> tuple:
    return tuple(place for place, result in enumerate(compared.results.values())
                 if limit and result.report.step_peak.total > limit)


@shows("4.4")
def show_ladder(compared, *found: Largest):
    """One chart: memory of the same model, tokens per second, and the largest model that fits."""
    names, tokens = list(compared.results), compared.size.tokens
    by_name = {one.name: one for one in found}
    guess = guessed("times larger than with DDP, FSDP + checkpointing")
    base = by_name["DDP"] if "DDP" in by_name else found[0]
    panels = [
        _peaks(compared, base.limit),
        pictures.Panel("throughput", "tokens/s",
                       [tokens / r.seconds for r in compared.results.values()]),
        pictures.Panel("largest that fits", "M parameters",
                       [_size(by_name.get(name), "found") for name in names], 1e6,
                       [_size(by_name.get(name), "predicted") for name in names],
                       [guess and guess * _size(base, "predicted") if "checkpointing" == name[-13:]
                        else None for name in names], missing="not tried")]
    return pictures.side_by_side(names, panels)


def _size(one, which):
    layers = one and getattr(one, which)
    return limits.parameters(layers) if layers else None


@shows("4.4")
def table(compared, *found: Largest) -> Table:
    """The same in numbers."""
    by_name = {one.name: one for one in found}
    rows = []
    for name, result in compared.results.items():
        one = by_name.get(name)
        rows.append((name, f"{result.report.step_peak.total / 1e6:.1f}",
                     f"{compared.size.tokens / result.seconds:,.0f}",
                     *(f"{_size(one, which) / 1e6:.2f}" if _size(one, which) else "–"
                       for which in ("predicted", "found")),
                     f"{abs(one.off):.0%}" if one and one.found else "–"))
    head = ("", "MB at the peak", "tokens/s", "predicted, M", "found, M", "apart")
    return Table(f"{limits.parameters(compared.size.layers) / 1e6:.1f} M parameters on "
                 f"{compared.size.ranks} ranks, and the largest model under "
                 f"{found[0].limit / 1e6:g} MB a rank", head, rows)


@shows("4.4")
def show_offload(compared, name: str = "FSDP + CPU offload"):
    """What would stay on a GPU under CPU offload: of the measured bytes those that are not shards,
    since parameters, gradients and optimizer state then live on the host; and what would travel."""
    offloaded, without = compared.results[name], compared.results["FSDP"]
    held = offloaded.report.step_peak
    host = held.parameters + held.gradients + held.optimizer_state
    travels = sum(call.bytes for call in offloaded.calls) / compared.size.ranks
    rows = [("on the host", f"{host / 1e6:.1f} MB", "parameters, gradients, optimizer state"),
            ("on a GPU", f"{(held.total - host) / 1e6:.1f} MB", "activations, gathered parameters"),
            ("over PCIe in a step", f"{travels / 1e6:.1f} MB",
             "a shard for each gather, and its gradient back"),
            ("time of a step, here", *offloaded.slower(without).split(" ", 1))]
    return Table("One rank with CPU offload, sorted from what was measured here", ("", "", ""),
                 rows, left=0, note="Here both are the same memory, and nothing travels: this "
                                    "shows what would be where, not a smaller peak, nor the price "
                                    "in time.")
