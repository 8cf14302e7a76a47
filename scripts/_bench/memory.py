"""Predicted against measured memory: the peak of a training step on a grid of real runs, by our two
predictions and by other people's."""

import statistics

from _bench import memory_cases, memory_large, memory_measured, memory_peers
from _bench.progress import done, say
from labs.predictions import hardware
from labs.predictions.dryrun import dry_run
from labs.predictions.memory.predict import predict
from labs.workers import cuda

RECIPES = {"fp32": "fp32", "bf16": "bf16", "mixed": "bf16 policy"}
COMPARED = """\
Compared, for every method alike: the most bytes that a rank's tensors take at once in the second
training step (building is over, the optimizer's state is there), the batch included; measured
from every allocation of real ranks over gloo. Off: (predicted - measured) / measured."""
COMPARED_ON_GPU = """\
Compared, for every method alike: torch.cuda.max_memory_allocated of the second training step on
one GPU; of 8 ranks the other 7 are not there. Off: (predicted - measured) / measured."""


def predicted_by_recording(case, device) -> int:
    """The peak of a recorded step, scaled to this case."""
    workspace = _workspace() if device == "cuda" else 0
    return workspace + predict(
        case.config, batch=case.batch, sequence=case.sequence, ranks=case.ranks,
        strategy=case.strategy, recipe=RECIPES[case.precision], checkpointing=case.checkpointing,
        reshard=case.reshard, bucket_view=case.view, device=device, inputs=True)["peak"].total


def _workspace() -> int:
    """Bytes that cuBLAS takes from PyTorch's allocator on this GPU; no tensor is behind them."""
    version = "".join(map(str, cuda.capability()))
    return hardware.overheads(architecture=f"sm{version}")["cuBLAS"]


def predicted_by_dry_run(case, device) -> int:
    """The dry run's peak."""
    workspace = _workspace() if device == "cuda" else 0
    return workspace + dry_run(
        case.config, ranks=case.ranks, strategy=case.strategy, batch=case.batch,
        sequence=case.sequence, precision=case.precision, checkpointing=case.checkpointing,
        device=device, backend="nccl" if device == "cuda" else "gloo", **case.options).peak.total


METHODS = {
    "dry run": (predicted_by_dry_run, "the step of any job"),
    "recording": (predicted_by_recording, "the step of any decoder, scaled from other sizes"),
    "MemTracker": (memory_peers.mem_tracker, "the step, as the dispatcher sees it; not FSDP2"),
    "FSDPMemTracker": (memory_peers.fsdp_mem_tracker, "the same under FSDP2 only"),
    "DeepSpeed": (memory_peers.deepspeed, "a GPU's model states, 16-bit and fp32, under ZeRO-2 "
                                          "(kept) or ZeRO-3; no activations"),
    "DeepSpeed + CPU": (memory_peers.deepspeed_with_cpu,
                        "the same, and a rank's share of its figure for the CPU"),
    "accelerate": (memory_peers.accelerate,
                   "parameters, gradients and Adam of one rank; no activations"),
}
OURS = ("dry run", "recording")


def run(arguments, grid=memory_cases.grid) -> dict:
    """cases: how many; methods: method -> mean and worst per cent off; runs: every case; residuals:
    the worst of each method; seconds and GB of RAM of the large dry runs. grid(large=) returns the
    cases to choose from."""
    device = arguments.device or ("cuda" if cuda.count() else "cpu")
    whole = grid(large=device == "cuda")
    cases = memory_cases.chosen(whole, arguments.only, arguments.ranks, arguments.cases)
    runs = []
    for number, case in enumerate(cases, 1):
        say(f"{number} of {len(cases)}: {case.name}")
        runs.append(_one(case, device, arguments.rounds or memory_measured.MOST_RUNS))
    result = {"device": device, "cases": len(runs), "methods": _methods(runs),
              "residuals": _residuals(runs), "runs": runs}
    for name in memory_large.JOBS:
        wanted = len(cases) == len(whole) or name in (arguments.only or ())
        result[name] = _large(name) if wanted else None
    done()
    return result


def _large(name):
    say(name.replace("_", " "))
    return memory_large.measured(name)


def _one(case, device, most) -> dict:
    measured = (memory_measured.on_gpu(case) if device == "cuda"
                else memory_measured.on_ranks(case, most))
    predicted, cannot = {}, {}
    for name, (method, _) in METHODS.items():
        try:
            predicted[name] = method(case, device)
        except memory_peers.Cannot as error:
            cannot[name] = str(error)
        except RuntimeError as error:
            if name in OURS:
                raise
            cannot[name] = f"failed: {error}"
    return {"case": case.name, "measured_bytes": measured["bytes"],
            "measured_runs": measured["runs"], "measured_spread_pct": measured["spread_pct"],
            "predicted_bytes": predicted, "cannot": cannot,
            "off_pct": {name: 100 * (value / measured["bytes"] - 1)
                        for name, value in predicted.items()}}


def _methods(runs) -> dict:
    found = {}
    for name, (_, claim) in METHODS.items():
        mine = [run for run in runs if name in run["off_pct"]]
        reasons = sorted({run["cannot"][name] for run in runs if name in run["cannot"]})
        found[name] = {**_score(mine, name), "cases": len(mine), "claims": claim,
                       "leaves_out": reasons}
        if name not in OURS:
            found[name]["ours_on_the_same"] = {ours: _score(mine, ours) for ours in OURS}
    return found


def _score(runs, name) -> dict:
    off = [abs(run["off_pct"][name]) for run in runs]
    return {"mean_pct": statistics.mean(off) if off else None, "worst_pct": max(off, default=None)}


def _residuals(runs, each=3) -> list:
    rows = [{"method": name, "case": run["case"], "off_pct": off,
             "off_bytes": run["predicted_bytes"][name] - run["measured_bytes"]}
            for name in METHODS for run in runs if (off := run["off_pct"].get(name)) is not None]
    by_method = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    return [row for mine in by_method.values()
            for row in sorted(mine, key=lambda row: -abs(row["off_pct"]))[:each]]


def table(result) -> str:
    """The result for a terminal."""
    cuda = result["device"] == "cuda"
    lines = [COMPARED_ON_GPU if cuda else COMPARED, "",
             f"{'':16s}{'mean':>11s}{'worst':>11s}{'cases':>7s}   what it claims to estimate"]
    for name, row in result["methods"].items():
        lines.append(f"{name:16s}{_pct(row['mean_pct'])}{_pct(row['worst_pct'])}"
                     f"{row['cases']:7d}   {row['claims']}")
        for ours, score in row.get("ours_on_the_same", {}).items() if row["cases"] else ():
            lines.append(f"  {ours:14s}{_pct(score['mean_pct'])}{_pct(score['worst_pct'])}"
                         "          on the same cases")
        lines += [f"  leaves out: {reason}" for reason in row["leaves_out"]]
    lines += ["", "furthest off:"]
    lines += [f"  {row['method']:15s}{row['off_pct']:>+9.4f} % {row['off_bytes']:>+14,.0f} bytes   "
              f"{row['case']}" for row in result["residuals"]]
    lines += ["", *_large_lines(result)]
    return "\n".join(lines).rstrip()


def _pct(value) -> str:
    return f"{'-':>11s}" if value is None else f"{value:>9.4f} %"


def _large_lines(result) -> list:
    return [f"{name.replace('_', ' ')} ranks: {row['seconds']:.1f} s and {row['peak_ram_gb']:.2f} "
            f"GB of RAM for a rank of {row['peak_gb']:.1f} GB; {row['note']}"
            for name in memory_large.JOBS if (row := result[name])]
