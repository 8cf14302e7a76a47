"""Exercise 7.27: pipeline.py, started on ranks as torchrun does it: its stages, its losses and
parameters, and how many micro-batches are in flight."""

import argparse
import json
from argparse import Namespace
from pathlib import Path

import torch

from labs.checks.scripts import forked, run_end
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.updates import far
from labs.checks.verdicts import Wrong, check
from labs.pipeline_parallel import pipeline_layers
from labs.words import counted, format_distinct, listed, named_ranks
from labs.workers import processes
from labs.workers.launcher import launch
from labs.workers.progress import status

CONTEXT, EPOCHS, SAMPLES, BATCH = 64, 2, 32, 16
MICRO_BATCHES = 8  # more than ranks: under GPipe as many would be in flight
ACTIVATION = BATCH // MICRO_BATCHES * CONTEXT * 64 * 4  # bytes of a micro-batch's, width 64, fp32
PARAMETERS = 1e-3  # of the way that training took: float32 sums in another order
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "divisible": "micro_batches cut the batch: each has options.batch / options.micro_batches "
                 "samples.",
    "Expected shape": "Each stage gets what the stage before it returns: is the order of the "
                      "layers that of the ranks?"}


@check("7.27", _HINTS)
def check_pipeline(script: str = "pipeline.py"):
    """On 2 ranks with 5 layers and on 4 with 6, pipeline.py must put each layer on one rank, train
    as one process does, return the losses on the last rank, and keep no more micro-batches in
    flight than 1F1B."""
    if waits := waits_for("7.27", script):
        return waits
    for ranks, blocks, seed in ((2, 3, 3), (4, 4, 5)):
        numbers = {"samples": SAMPLES, "batch": BATCH, "micro_batches": MICRO_BATCHES,
                   "epochs": EPOCHS, "blocks": blocks, "seed": seed}
        with status(f"{ranks} ranks"), processes.temporary_folder() as folder:
            run = forked.run(script, (*forked.options(numbers), "--folder", str(folder)), ranks,
                             option=None, shared=folder)
            _judge(run, f"{ranks} ranks, {blocks + 2} layers", Path(folder), numbers)
    return ("each layer is on one rank, on 2 ranks and on 4; losses and parameters are those of "
            "one process; no stage has more micro-batches in flight than 1F1B")


def _judge(run, when, folder, numbers):
    run_end.judge_end(run, when)
    [(losses, initial, parameters)] = launch(_reference, numbers, ranks=1, quiet=True)
    saved = [torch.load(folder / f"stage_{rank}.pt", weights_only=True, map_location="cpu")
             for rank in range(run.ranks)]
    _judge_stages(saved, when, initial)
    path = folder / "losses.json"
    found = json.loads(path.read_text()) if path.exists() else []
    if len(found) != len(losses):
        raise Wrong(f"{when}: the last rank returned losses of {counted(len(found), 'step')}, and "
                    f"there are {len(losses)}",
                    "Only the last rank has losses: train returns one of each step there, and an "
                    "empty list elsewhere.", code="wrong_count")
    for step, (got, want) in enumerate(zip(found, losses, strict=True)):
        if far(got, want):
            is_, should_be = format_distinct(got, want, digits=5)
            raise Wrong(f"{when}, step {step}: the loss is {is_}, of one process {should_be}"
                        + _cause(got, want), "Mean over the micro-batches of the step, of the "
                        "loss and of its gradient (torch's schedule divides by their number); the "
                        "optimizer steps once for each batch, and zero_grad follows.",
                        code="wrong_loss")
    _judge_parameters(saved, when, initial, parameters)
    _judge_in_flight(run, when)


def _cause(got, want) -> str:
    return (": the sum over its micro-batches" if not far(got / MICRO_BATCHES, want) else "")


def _judge_stages(saved, when, initial):
    layers = list(dict.fromkeys(name.split(".")[0] for name in initial))
    mine = [list(dict.fromkeys(name.split(".")[0] for name in each)) for each in saved]
    strangers = sorted({name for each in mine for name in each} - set(layers))
    if strangers:
        names = f"{listed(list(map(repr, strangers[:2])))} " + (
            "are not the names of layers" if len(strangers) > 1 else "is not the name of a layer")
        raise Wrong(f"{when}: {names}; the layers are {listed(layers)}",
                    "nn.Sequential(OrderedDict(...)) of pairs (name, layer).", code="wrong_keys")
    for layer in layers:
        who = [rank for rank, each in enumerate(mine) if layer in each]
        if len(who) != 1:
            raise Wrong(f"{when}: layer {layer!r} is on "
                        + (named_ranks(who) if who else "no rank"), "Rank r of n has the layers "
                        "from r/n to (r + 1)/n of their number.", code="layers_not_partitioned")
    if [name for each in mine for name in each] != layers:
        raise Wrong(f"{when}: the ranks have {'; '.join(', '.join(each) for each in mine)}",
                    "A stage's layers lie beside each other, in the order in which they run.",
                    code="wrong_order")
    sizes = [len(each) for each in mine]
    if max(sizes) - min(sizes) > 1:
        raise Wrong(f"{when}: the ranks have {listed(sizes)} layers", "As many as the others, or "
                    "one fewer: the longest stage is the clock of all.", code="uneven_stages")


def _judge_parameters(saved, when, initial, parameters):
    found = {name: value for each in saved for name, value in each.items()}
    away, way = (sum((tensors[name] - parameters[name]).square().sum() for name in parameters)
                 for tensors in (found, initial))
    # Invariant: the last update counts, too, and shows in no loss.
    if away.sqrt() > PARAMETERS * way.sqrt():
        raise Wrong(f"{when}: at the end the parameters are "
                    f"{(away / way).sqrt().item():.0%} of the way that training took away from "
                    "those of one process", "Each rank's optimizer has the parameters of its own "
                    "module, and steps once for each batch.", code="differs_from_reference")


def _judge_in_flight(run, when):
    """On the first stage: what it has sent on, and got no gradient of yet."""
    # What is smaller or larger is no activation: torch sends their shapes as objects before.
    own = [kind for kind, nbytes in run.records[0].calls if nbytes == ACTIVATION]
    sent, steps = own.count("send"), len(run.records[0].steps)
    if sent != MICRO_BATCHES * steps:
        raise Wrong(f"{when}: rank 0 sent the activations of {sent} micro-batches of "
                    f"{BATCH // MICRO_BATCHES} samples in {counted(steps, 'step')}; each step has "
                    f"{MICRO_BATCHES}",
                    "The schedule gets options.micro_batches.", code="wrong_micro_batches")
    most = flying = 0
    for kind in own:
        flying += (kind == "send") - (kind == "recv")
        most = max(most, flying)
    # One more than 1F1B keeps: a send may be issued together with the receive before it.
    if most > run.ranks + 1:
        raise Wrong(f"{when}: rank 0 had {most} micro-batches in flight; under 1F1B at most "
                    f"{run.ranks} are", "Schedule1F1B, not ScheduleGPipe.", code="not_1f1b")


def _reference(numbers) -> tuple[list[float], dict, dict]:
    """On a rank: losses of each step, and the parameters before and after, as one process has them.
    The layers are those that the script gives to the student."""
    torch.set_num_threads(1)
    layers = pipeline_layers.make_layers(Namespace(**numbers))
    module = torch.nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    text = Path(argparse.__file__).read_bytes()[:SAMPLES * CONTEXT]
    batches = torch.tensor(list(text)).view(-1, BATCH, CONTEXT)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for batch in EPOCHS * list(batches):
        loss = pipeline_layers.loss_of(module(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, initial, dict(module.state_dict())
