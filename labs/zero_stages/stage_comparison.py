"""Exercise 3.8: the student's stages compared with DDP and the real libraries, and the pictures of
it; what each is expected to hold and to send is data of this notebook."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from labs.checks.comparison import Comparison, Measured, compare, config_of, model_of
from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.marks import answered
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.communication.traffic import passes, stage_passes
from labs.predictions.memory.predict import predict
from labs.predictions.memory.recipes import model_states, recipe_of
from labs.training import strategies
from labs.training.memory_categories import GB, Memory
from labs.training.models import count_trainable
from labs.training.presets import Preset
from labs.words import listed
from labs.workers import devices

# One short sequence on each of four ranks or more: activations, which no stage divides, are few, so
# that the stages' peaks differ by what they divide.
RANKS, TOKENS = 4, 16
PHASES = ("forward", "backward", "step")
RECORDED = "(recorded)"  # of a library that is not installed here, from RECORDING
RECORDING = Path(__file__).resolve().parents[2] / "experiments/reference/zero_deepspeed.json"


@dataclass(frozen=True)
class Expected:
    """What a strategy is expected to hold and to send.

    stage: of ZeRO, 0 for DDP; it holds the states of that stage. sends: collective -> how often all
    Ψ elements go through it in a step. more: elements of a model that are gathered beyond that, or
    fewer where negative. gathered: bytes of a parameter's element in an all-gather.
    options: of `predict` of labs.predictions.memory, which knows every phase of a step of torch's
    own strategies; None for the others.
    """

    stage: int
    sends: dict[str, int]
    more: Callable[[nn.Module], int] | None = None
    gathered: int = 4
    options: dict | None = None

    def elements(self, comparison: Comparison) -> dict[str, int]:
        """Collective -> elements that go through it in a step."""
        found = {kind: often * comparison.parameters for kind, often in self.sends.items()}
        if self.more:
            # Only its sizes are needed: on "meta" it takes no memory, and no time to draw.
            with torch.device("meta"):
                found["all_gather"] += self.more(model_of(comparison.preset))
        return found

    def communication_volume(self, comparison: Comparison) -> float:
        """How many Ψ a step sends, an all-reduce counted twice; each rank sends (N-1)/N of it."""
        return sum(passes(kind) * elements for kind, elements in
                   self.elements(comparison).items()) / comparison.parameters

    def bytes(self, comparison: Comparison) -> float:
        """The same in bytes."""
        sizes = {"all_gather": self.gathered}
        return sum(passes(kind) * elements * sizes.get(kind, 4)
                   for kind, elements in self.elements(comparison).items())

    def states(self, comparison: Comparison) -> Memory:
        """Bytes of parameters, gradients and optimizer state of one rank, in fp32 with AdamW."""
        return model_states(comparison.parameters, ranks=comparison.preset.ranks, stage=self.stage)

    def memory(self, comparison: Comparison, moment: str) -> Memory | None:
        """All that a rank of this machine's devices holds at the end of a phase or at the "peak" of
        a step; None for a strategy whose steps cannot be predicted."""
        if self.options is None:
            return None
        preset = comparison.preset
        plan = devices.plan(preset.ranks)
        return predict(config_of(preset), batch=preset.batch, sequence=preset.context,
                       ranks=preset.ranks, device=plan.device, backend=plan.library,
                       **self.options)[moment]


def _more_under_deepspeed(model) -> int:
    """DeepSpeed gathers for each module that computes: a shared weight for each of its modules, in
    forward and in backward. The last blocks stay gathered from forward to backward, as
    many as stage3_max_live_parameters allows, so backward does not gather them."""
    uses = [p for module in model.modules() for p in module._parameters.values() if p is not None]
    shared = sum(p.numel() for p in uses) - count_trainable(model)
    return 2 * shared - strategies.LIVE_BLOCKS * strategies.largest_block(model)


# DeepSpeed's first two stages all-reduce gradients, whatever the paper says
# (`use_multi_rank_bucket_allreduce`, on by default).
_ALL_REDUCED = {"all_reduce": 1, "all_gather": 1}
_EXPECTED = {
    "DDP": Expected(0, stage_passes(0), options={"strategy": "ddp"}),
    "ZeroRedundancyOptimizer": Expected(1, {"all_reduce": 1, "broadcast": 1},
                                        options={"strategy": "zero1"}),
    "FSDP2, no reshard": Expected(3, stage_passes(3, reshard=False),
                                  options={"strategy": "fsdp2", "reshard": False}),
    "FSDP2": Expected(3, stage_passes(3), options={"strategy": "fsdp2"}),
    "FSDP2, bf16 gathers": Expected(3, stage_passes(3), gathered=2,
                                    options={"strategy": "fsdp2", "recipe": "bf16 policy"}),
    "DeepSpeed 1": Expected(1, _ALL_REDUCED),
    "DeepSpeed 2": Expected(2, _ALL_REDUCED),
    "DeepSpeed 3": Expected(3, stage_passes(3), more=_more_under_deepspeed),
}


def expected(name: str) -> Expected:
    """What the strategy with this name in a comparison is expected to do. A student's has its stage
    in its name; raises ValueError if it has not."""
    name = name.removesuffix(RECORDED).strip()
    if name in _EXPECTED:
        return _EXPECTED[name]
    digit = re.search(r"[123]", name)
    if not digit:
        raise ValueError(f"{name!r} does not say which stage it is: name it, say, 'ZeRO-2'")
    return Expected(int(digit[0]), stage_passes(int(digit[0])))


@shows("3.8")
def compare_stages(mine: Mapping[str, Callable], preset: Preset) -> Comparison:
    """Trains DDP, every strategy of `mine` (name -> strategy; the digit in the name is its stage)
    and those of the libraries that are installed on four ranks or more, and records what each holds
    and sends, and in which phase. DeepSpeed's are recorded ones where it is not installed."""
    for name in mine:
        expected(name)  # a name without a stage is refused before anything runs
    small = small_preset(preset)
    found = compare({"DDP": strategies.ddp, **mine, **_libraries()}, small,
                    observe=sent_by_phase)
    return found if strategies.has_deepspeed() else replace(
        found, results=found.results | read_recording(small))


def small_preset(preset: Preset) -> Preset:
    """The preset with one sequence of TOKENS tokens on each of RANKS ranks or more."""
    return replace(preset, ranks=max(RANKS, preset.ranks), batch=1, context=TOKENS)


def sent_by_phase(module, optimizer, batch) -> dict[str, Counter]:
    """On a rank: phase of a step -> kind of collective -> elements."""
    found = {}
    with Traffic() as traffic:
        def end(phase):
            found[phase] = Counter()
            for call in traffic.calls:
                found[phase][call.kind] += call.elements
            traffic.events.clear()

        loss = module(**batch).loss
        end("forward")
        loss.backward()
        end("backward")
        optimizer.step()
        optimizer.zero_grad()
        end("step")
    return found


def peak_phase(report: memory.Report) -> str:
    """The phase of a step in which most is allocated."""
    return max(PHASES, key=lambda phase: report.peaks[phase].total)


def _libraries() -> dict[str, Callable]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {"ZeroRedundancyOptimizer": strategies.zero_redundancy,
             "FSDP2, no reshard": strategies.fsdp2_no_reshard, "FSDP2": strategies.fsdp2,
             "FSDP2, bf16 gathers": partial(strategies.fsdp2, mp_policy=half)}
    if strategies.has_deepspeed():
        found |= {"DeepSpeed 1": strategies.deepspeed1, "DeepSpeed 2": strategies.deepspeed2,
                  "DeepSpeed 3": strategies.deepspeed3}
    return found


def write_recording(comparison: Comparison, path: Path = RECORDING) -> None:
    """Writes what DeepSpeed's strategies of a comparison hold and send, for machines without it."""
    results = {name: {
        "phases": {phase: asdict(held) for phase, held in one.report.phases.items()},
        "step_peak": asdict(one.report.step_peak), "peak_phase": peak_phase(one.report),
        "losses": one.losses,
        "calls": [[call.kind, call.elements, call.bytes] for call in one.calls],
        "sent_by_phase": one.observed[0]} for name, one in comparison.results.items()
        if name.startswith("DeepSpeed")}
    path.write_text(json.dumps({"preset": _sizes(comparison.preset), "results": results}) + "\n")


def read_recording(preset: Preset, path: Path = RECORDING) -> dict[str, Measured]:
    """Name -> what was recorded of DeepSpeed; empty where the preset is another than then."""
    recorded = json.loads(path.read_text())
    if recorded["preset"] != _sizes(preset):
        return {}
    return {f"{name} {RECORDED}": _measured(one) for name, one in recorded["results"].items()}


def _sizes(preset) -> dict[str, int]:
    return {name: getattr(preset, name) for name in ("ranks", "layers", "hidden", "heads",
                                                     "context", "batch")}


def _measured(one) -> Measured:
    phases = {phase: Memory(**held) for phase, held in one["phases"].items()}
    peak = Memory(**one["step_peak"])
    calls = [CollectiveCall(kind, elements, nbytes, False, 0.0)
             for kind, elements, nbytes in one["calls"]]
    report = memory.Report(phases, peak, dict.fromkeys(memory.PHASES, Memory())
                           | {one["peak_phase"]: peak})
    return Measured(report, calls, one["losses"], observed=[one["sent_by_phase"]])


MOMENTS = {"build": "after building", "forward": "after forward", "backward": "after backward",
           "step": "after the step", "peak": "at the peak of a step"}
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
TABLE_RECIPE = "bf16, fp32 moments"  # 12 bytes per parameter
_TRAFFIC_GUESSES = {"ZeRO-1": "3.2", "ZeRO-3": "3.4"}  # strategy -> exercise
_RECORDED_NOTE = "on the machine of the worked notebook, where the library was installed."


@shows("3.8")
def show_memory(comparison: Comparison, moment: str = "backward") -> Picture:
    """What a rank holds under each strategy, by category. moment: one of MOMENTS.

    The formula's tick after backward counts parameters, gradients and optimizer state: no other
    tensor is needed then. At other moments it is the predicted step of torch's strategies. At the
    peak, a note says in which phase of the step each strategy's highest moment lies.
    """
    if moment not in MOMENTS:
        raise ValueError(f"no moment {moment!r}: choose {', '.join(MOMENTS)}")
    guess = guessed("3.8") if moment == "backward" else None
    rows = []
    for name, result in comparison.results.items():
        held = result.report.step_peak if moment == "peak" else result.report.phases[moment]
        known = expected(name)
        formula = (known.states(comparison) if moment == "backward"
                   else known.memory(comparison, moment))
        rows.append(MemoryRow(name, held, formula and formula.total,
                              guess and guess * 1e6 if name == "ZeRO-2" else None))
    note = _peak_phases(comparison) if moment == "peak" else ""
    totals = {row.name: row.measured.total for row in rows}
    first, least = rows[0].name, min(totals, key=totals.get)
    return memory_bars(rows, f"of one rank {MOMENTS[moment]}", unit="MB", note=note,
                       lesson=f"{' '.join(least.split())}: {totals[least] / totals[first]:.0%} of "
                              f"what {first} holds {MOMENTS[moment]}")


def _peak_phases(comparison) -> str:
    """In which phase of a step each strategy's memory is highest, as a sentence."""
    names = {}
    for name, result in comparison.results.items():
        # a name's comma would read as the end of the name
        names.setdefault(peak_phase(result.report), []).append(name.replace(",", ""))
    parts = [f"{'in the step' if phase == 'step' else f'in {phase}'} for {listed(names[phase])}"
             for phase in PHASES if phase in names]
    return f"The highest moment lies {'; '.join(parts)}."


@shows("3.8")
def show_traffic(comparison: Comparison) -> Picture:
    """What each strategy sends in one step, by collective: in Ψ and in bytes, where an all-reduce
    counts twice, and in how many calls."""
    names, results = list(comparison.results), list(comparison.results.values())
    known, ranks = [expected(name) for name in names], comparison.preset.ranks
    guesses = [guessed(_TRAFFIC_GUESSES[name]) if name in _TRAFFIC_GUESSES else None
               for name in names]
    elements = [{kind: passes(kind) * n / comparison.parameters
                 for kind, n in result.elements.items()} for result in results]
    nbytes = [{kind: passes(kind) * n for kind, n in result.bytes.items()} for result in results]
    return side_by_side(names, [
        Panel("elements sent", "Ψ per step", elements, 1,
              [one.communication_volume(comparison) for one in known], guesses),
        Panel("bytes sent", "MB per step", nbytes, 1e6,
              [one.bytes(comparison) for one in known]),
        Panel("collectives", "calls per step", [len(result.calls) for result in results],
              colour=palette.MUTED)],  # of all kinds, so none of their colours
        f"An all-reduce counts twice; each rank sends {ranks - 1}/{ranks} of what is counted here."
        + f" {RECORDED}: {_RECORDED_NOTE}" * any(
            name.endswith(RECORDED) for name in names))


@shows("3.8")
def show_phases(comparison: Comparison) -> Table:
    """How many Ψ each strategy sends in which phase of a step, measured, an all-reduce counted
    twice."""
    rows = []
    for name, result in comparison.results.items():
        by_phase = result.observed[0] if result.observed else {}
        totals = [sum(passes(kind) * n for kind, n in by_phase.get(phase, {}).items())
                  / comparison.parameters for phase in PHASES]
        rows.append((name, *(f"{total:.2f}" if total > 0.005 else "-" for total in totals),
                     f"{sum(totals):.2f}"))
    return Table(f"Ψ sent in a step, by phase, on {comparison.preset.ranks} ranks",
                 ("", *PHASES, "all"), rows, note="an all-reduce counts twice")


def show_state_bytes(parameters: float, ranks: int = 8) -> Table:
    """Bytes of model states on a rank under each stage, at 12 bytes per parameter, by formula; and
    the guess."""
    recipe = recipe_of(TABLE_RECIPE)
    divided = (0, recipe.optimizer_state, recipe.optimizer_state + recipe.gradients, recipe.total)
    rows = [(name, _psi(recipe.total - part), f"{_psi(part)}/{ranks}" if part else "",
             f"{model_states(parameters, recipe, ranks=ranks, stage=stage).total / GB:g}")
            for stage, (name, part) in enumerate(zip(STAGES, divided, strict=True))]
    [zero2] = [float(row[-1]) for row in rows if row[0] == "ZeRO-2"]
    return Table(f"{parameters / 1e9:g}B parameters on {ranks} ranks, {recipe.name}: GB per rank",
                 ("", "on every rank", "divided", "GB"), rows,
                 note=answered(guessed("3.8b"), zero2, "GB under ZeRO-2"))


def _psi(each) -> str:
    return f"{each:g}Ψ" if each else "0"


if __name__ == "__main__":  # writes RECORDING again; needs DeepSpeed
    from labs.training.presets import preset as preset_of

    write_recording(compare_stages({}, preset_of("laptop")))
