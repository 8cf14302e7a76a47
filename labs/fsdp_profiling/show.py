"""The pictures of notebook 05, each made from recorded steps."""

import statistics

import torch

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp_profiling import diagnosis, recording
from labs.fsdp_profiling.attribution_checks import strangers
from labs.fsdp_profiling.wire import slow_down
from labs.meters import throughput
from labs.meters import trace_units as units
from labs.meters.trace import KINDS, total_seconds, union
from labs.pictures import measured, palette, unit_timelines, widgets
from labs.pictures.tables import Table
from labs.training import data
from labs.workers import devices
from labs.workers.launcher import launch


@shows("5.1")
def show_timeline(recorded):
    """Every rank's step: what it computes, unit by unit, and what is under way."""
    return unit_timelines.by_rank({recorded.job.name: list(recorded)})


@shows("5.1")
def show_shares(recorded, communication_share):
    """The share of the step in each kind of collective, by rank, and the guess beside rank 0's."""
    guess = guessed("share of the step that is communication")
    rows = []
    for trace in recorded:
        shares = communication_share(trace)
        rows += [measured.Bar(f"rank {trace.rank}, {kind.replace('_', '-')}", share)
                 for kind, share in shares.items()]
        both = total_seconds(union(trace.of(*shares))) / trace.seconds  # a moment counts once
        rows.append(measured.Bar(f"rank {trace.rank}, both", both, guessed=guess))
    return measured.bars(rows, "", "of the recorded step")


@shows("5.2")
def show_seconds(recorded):
    """Milliseconds of each kind of collective on each rank: total, exposed, overlapped."""
    rows = []
    for trace in recorded:
        for kind in [kind for kind in KINDS if trace.of(kind)]:
            times = trace.seconds_of(kind)
            rows.append((trace.rank, kind, len(trace.of(kind)),
                         *(f"{1e3 * times[part]:.1f}" for part in
                           ("total", "exposed", "overlapped"))))
    return Table("milliseconds of the recorded step", ("rank", "kind", "calls", "total", "exposed",
                                                       "overlapped"), rows, left=1)


@shows("5.3")
def show_gathers(recorded, attribute):
    """Rank 0's all-gathers in the order in which they were issued, as `attribute` explains them."""
    trace = recorded[0]
    rows = [(number, *attribute(trace, one), f"{1e3 * one.issued:.1f}",
             f"{1e3 * (one.end - one.issued):.1f}", f"{one.bytes / 1e6:.2f}")
            for number, one in enumerate(trace.of("all_gather"))]
    return Table("all-gathers of rank 0", ("#", "unit", "phase", "called at, ms",
                                           "there after, ms", "MB"), rows, left=2)


@shows("5.4")
def show_strangers(recorded, call_site):
    """The collectives of rank 0 that no unit of FSDP asked for, and the line that did."""
    rows = [(one.kind, one.bytes, f"{1e3 * one.issued:.1f}", units.owner(recorded[0], one).phase,
             call_site(one).split("/labs/")[-1]) for one in strangers(recorded)]
    return Table("collectives of rank 0 that are not FSDP's",
                 ("kind", "bytes", "called at, ms", "phase",
                  "call site: file(line of its def): function"), rows, left=4)


@shows("5.6")
def show_prefetch(*recorded):
    """Rank 0's step of each run, one below the other."""
    return unit_timelines.by_rank({one.job.name: [one[0]] for one in recorded})


def explore_patients(patients):
    """The slow runs, chosen from a menu; without a live kernel, the first one."""
    def picture(run):
        return unit_timelines.by_rank({f"run {run}": list(patients.runs[run])})

    letters = sorted(patients.runs)
    choice = widgets.Choice("run", "run", [(letter, letter) for letter in letters], letters[0],
                            "menu")
    return widgets.Controls([choice], picture)


@shows("5.8")
def show_diagnoses(patients, diagnose):
    """What `diagnose` says of each run, and what was planted."""
    rows = [(letter, cause, _evidence(evidence), *rest) for letter, cause, evidence, *rest in
            diagnosis.diagnosed(diagnose, patients)]
    return Table("diagnoses", ("run", "diagnosed", "evidence", "planted", ""), rows, left=3)


def _evidence(evidence) -> str:
    if not hasattr(evidence, "seconds"):
        return str(evidence)
    size = f", {evidence.bytes / 1e6:.1f} MB" if getattr(evidence, "bytes", 0) else ""
    return (f"{evidence.name.split('#')[0]} at {1e3 * evidence.begin:.0f} ms, for "
            f"{1e3 * evidence.seconds:.1f} ms{size}")


@shows("5.7")
def show_price(job_preset, configures: dict, wire: float = 0.0, rounds: int = 9):
    """configures: name -> function that sets the prefetch of the blocks, or None. Throughput of
    each, the variants taking turns, unrecorded. wire: by which share of a step every all-gather
    arrives later than gloo has it."""
    results = launch(_race, job_preset, configures, wire, rounds, ranks=job_preset.ranks,
                     quiet=True, verify=False, hang_after=60)
    rates = throughput.tokens_per_second(list(results), job_preset.tokens)
    cost = guessed("what prefetch off costs, in percent of the throughput")
    first = next(iter(rates.values()))
    rows = [measured.Bar(name, rate, colour=palette.RANKS[0],
                         guessed=first * (1 - cost / 100) if cost is not None and number == 1
                         else None) for number, (name, rate) in enumerate(rates.items())]
    where = f"; all-gathers arrive {wire:g} of a step later" if wire else ""
    return measured.bars(rows, "tokens/s", f"of all ranks together (median of turns{where})")


def _race(job_preset, configures, wire, rounds):
    rank = torch.distributed.get_rank()
    [batch] = data.lm_batches(1, job_preset.batch, job_preset.context, seed=1000 * rank)
    batch = {name: value.to(devices.device()) for name, value in batch.items()}
    built = {name: recording.build(recording.Job(job_preset, configure=configure))
             for name, configure in configures.items()}
    steps = {name: _stepping(parts, batch) for name, parts in built.items()}
    if wire:
        usual = throughput.seconds_per_step(dict([next(iter(steps.items()))]), rounds=3)
        seconds = [statistics.median(*usual.values())]
        torch.distributed.broadcast_object_list(seconds)
        for model, _ in built.values():
            slow_down(model, wire * seconds[0])
    return throughput.seconds_per_step(steps, rounds, repeat=2)


def _stepping(parts, batch):
    module, optimizer = parts

    def step():
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
