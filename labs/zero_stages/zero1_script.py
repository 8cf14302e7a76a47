"""Exercise 3.11: zero1.py, started on ranks as torchrun does it: who owns which optimizer state,
and whether all train as one process does."""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from labs.checks.scripts import drawn_samples, forked, run_end
from labs.checks.scripts.expected_training import CONTEXT, train_on
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.updates import GRADIENT, WAY, drawn_by
from labs.checks.verdicts import Wrong, check
from labs.training import models
from labs.words import named_ranks
from labs.workers.launcher import launch
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

EPOCHS, BATCH, HIDDEN = 2, 3, 16
MOMENTS = 2 * 4  # bytes of AdamW's two moments in fp32, for a number
_MEAN = "Divide by the number of ranks once, before or after the sum."
_IN_PLACE = "A parameter is written under torch.no_grad(), or through parameter.detach()."
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "optimizer got an empty parameter list": "Each rank owns some of the parameters.",
    "a leaf Variable that requires grad": _IN_PLACE, "is a view of a leaf Variable": _IN_PLACE}


@dataclass(frozen=True)
class Case:
    """A run of zero1.py."""

    ranks: int
    samples: int
    layers: int
    seed: int

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        numbers = {"samples": self.samples, "epochs": EPOCHS, "batch": BATCH,
                   "layers": self.layers, "hidden": HIDDEN, "seed": self.seed}
        return forked.run(script, forked.options(numbers), self.ranks, failing_rank, option=None)

    @property
    def rows(self) -> torch.Tensor:
        """The tokens of its samples, (samples, CONTEXT), as the script cuts them."""
        text = Path(argparse.__file__).read_bytes()[:self.samples * CONTEXT]
        return torch.tensor(list(text)).view(self.samples, CONTEXT)


# In each case a rank's last batch is shorter.
CASES = (Case(2, 22, layers=1, seed=3), Case(3, 24, layers=2, seed=5))


@check("3.11", _HINTS)
def check_zero1_script(script: str = "zero1.py"):
    """On 2 and on 3 ranks each parameter has one owner, and the owners about as much optimizer
    state; an owner updates with the mean gradient, and all ranks have the same parameters, those of
    one process; where a rank raises, the job must fail."""
    if waits := waits_for("3.11", script):
        return waits
    for case in CASES:
        with status(f"{case.ranks} ranks"):
            _judge(case.run(script), case)
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(CASES[0].run(script, FAILING_RANK))
    return ("each parameter has one owner, on 2 ranks and on 3, and none keeps much more optimizer "
            "state than its part; gradients and parameters are those of one process; when a rank "
            "fails, the job fails")


def _judge(run, case):
    when = f"{case.ranks} ranks"
    run_end.judge_end(run, when)
    drawn_samples.judge(run, when, case.rows, EPOCHS, BATCH)
    drawn_samples.judge_batches(run, when, EPOCHS, BATCH)
    _judge_owners(run, when, case)
    make_model = partial(models.gpt2, case.layers, HIDDEN, context=CONTEXT, seed=case.seed)
    [expected] = launch(train_on, drawn_by(run), make_model, False, ranks=1, quiet=True)
    _judge_gradients(run, when, expected)
    _judge_parameters(run, when, expected)
    run_end.judge_speaker(run, when)


def _judge_owners(run, when, case):
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in
                 models.gpt2(case.layers, HIDDEN, context=CONTEXT).named_parameters()}
    owned = [set(record.steps[-1].owned) for record in run.records]
    # Invariant: each parameter is in one rank's optimizer. Catches plain AdamW on all ranks, and a
    # parameter that nobody updates.
    for name in sizes:
        owners = [rank for rank, names in enumerate(owned) if name in names]
        if len(owners) != 1:
            raise Wrong(f"{when}: parameter {name!r} is in the optimizer of "
                        + (named_ranks(owners) if owners else "no rank"),
                        "Each rank's AdamW gets the parameters that this rank owns.",
                        code="owned_by_many" if owners else "owned_by_none")
    most = MOMENTS * (math.ceil(sum(sizes.values()) / run.ranks) + max(sizes.values()))
    for rank, record in enumerate(run.records):
        if record.optimizer_state > most:
            equal = MOMENTS * sum(sizes.values()) / run.ranks
            raise Wrong(f"{when}: rank {rank} keeps {record.optimizer_state:,} bytes of optimizer "
                        f"state; an equal part of all is {equal:,.0f}",
                        "The largest parameters first, each to the rank that has least.",
                        code="uneven_shares")


def _judge_gradients(run, when, expected):
    """Where a parameter is owned, its gradient is the mean over all ranks' samples."""
    for step, want in enumerate(expected.gradients):
        whole = math.sqrt(sum(gradient.square().sum().item() for gradient in want.values()))
        for rank, record in enumerate(run.records):
            for name in record.steps[step].owned:
                found = record.steps[step].gradients.get(name)
                if found is not None and _is_near(found, want[name], whole):
                    continue
                what = _what(found, want[name], whole, run.ranks, expected, rank, name, step)
                if step and not what:
                    raise Wrong(f"{when}, step {step}: the gradient of {name!r} is another one "
                                f"than one process has: the update of step {step - 1} left other "
                                "parameters", "AdamW with the lr that it is given, once a step; "
                                "then the owners' parameters go to all.", code="wrong_update")
                raise Wrong(f"{when}, step {step}: rank {rank} owns {name!r}, and its gradient "
                            + (what or "is not the mean over all ranks' samples"), _MEAN,
                            code="wrong_gradient")


def _is_near(found, want, whole) -> bool:
    return bool((found - want).norm() <= GRADIENT * whole)


def _what(found, want, whole, ranks, expected, rank, name, step) -> str:
    if found is None:
        return "is None"
    if _is_near(found / ranks, want, whole):
        return "is the sum over the ranks, not the mean"
    if _is_near(found * ranks, want, whole):
        return f"is the mean divided by {ranks}: averaged twice"
    if step == 0 and _is_near(found, expected.alone[rank][name], whole):
        return "is that of its own samples alone"
    return ""


def _judge_parameters(run, when, expected):
    def norm(tensors):
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))

    first = run.records[0].parameters
    for rank, record in enumerate(run.records):
        # Invariant: after a step all ranks have the owners' parameters, to the bit.
        others = [name for name, value in record.parameters.items()
                  if not torch.equal(value, first[name])]
        if others:
            raise Wrong(f"{when}: at the end rank {rank} has another {others[0]!r} than rank 0",
                        "After the update each owner broadcasts its parameters.",
                        code="replicas_differ")
    away = norm(first[name] - value for name, value in expected.parameters.items())
    way = norm(expected.initial[name] - value for name, value in expected.parameters.items())
    if not away <= WAY * way:
        raise Wrong(f"{when}: at the end the parameters are {away / way:.0%} of the way that "
                    "training took away from those of one process",
                    "Every step updates all parameters once, with the lr that it is given.",
                    code="differs_from_reference")
