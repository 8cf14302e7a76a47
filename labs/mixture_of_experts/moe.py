"""Exercise 9.10: moe.py, started on ranks as torchrun does it: who draws which samples, which
experts a rank has, its gradients, and whether the saved model is that of one process."""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from labs.checks.scripts import drawn_samples, forked, run_end
from labs.checks.scripts.expected_training import CONTEXT, train_on
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.updates import GRADIENT, WAY, drawn_by
from labs.checks.verdicts import Wrong, check
from labs.training import models
from labs.training.mixtures import ExpertLayer
from labs.words import listed
from labs.workers.launcher import launch
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

EPOCHS, BATCH, LAYERS, HIDDEN, EXPERTS = 2, 2, 2, 32, 4
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "split_with_sizes": "`Experts` gets the rows of all ranks, sorted by expert, and as many "
                        "counts as this rank has experts.",
    "<class 'NoneType'>": "A parameter has no gradient: do all rows pass through self.experts?",
    "expected size": "Do all ranks call the same all-to-alls? What arrives from rank i has as many "
                     "rows as rank i has sent: theirs[i].sum().",
    "Split sizes": "Rows that are sent: counts.sum(1); rows that arrive: theirs.sum(1)."}


@dataclass(frozen=True)
class Case:
    """A run of moe.py on ranks of which `expert` at a time divide the experts."""

    ranks: int
    expert: int
    chosen: int
    samples: int
    seed: int

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        numbers = {"expert": self.expert, "chosen": self.chosen, "samples": self.samples,
                   "epochs": EPOCHS, "batch": BATCH, "layers": LAYERS, "hidden": HIDDEN,
                   "experts": EXPERTS, "seed": self.seed}
        return forked.run(script, forked.options(numbers), self.ranks, failing_rank,
                          option=forked.CHECKPOINT)

    @property
    def rows(self) -> torch.Tensor:
        """The tokens of its samples, (samples, CONTEXT), as the script cuts them."""
        text = Path(argparse.__file__).read_bytes()[:self.samples * CONTEXT]
        return torch.tensor(list(text)).view(self.samples, CONTEXT)

    @property
    def when(self) -> str:
        """How a verdict names it."""
        return f"{self.ranks} ranks, --expert {self.expert}"

    def own(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a parameter, or of its gradient, that a rank has."""
        if ".experts." not in name:
            return tensor
        return tensor.chunk(self.expert)[rank % self.expert]


# In each case the last batch is shorter; a layer has more experts than a rank of the first has. No
# case has one chosen expert: its weight is then 1 whatever the router says, so that the router's
# gradient is rounding alone, of which AdamW makes steps of full size.
CASES = (Case(2, 2, chosen=2, samples=10, seed=3), Case(4, 2, chosen=3, samples=20, seed=5))


def make_model(chosen: int, seed: int) -> nn.Module:
    """The script's model, on one process."""
    model = models.llama(LAYERS, HIDDEN, heads=8, kv_heads=4, context=CONTEXT, intermediate=HIDDEN,
                         seed=seed)
    for layer in model.model.layers:
        layer.mlp = ExpertLayer(EXPERTS, HIDDEN, HIDDEN, chosen)
    return model


@check("9.10", _HINTS)
def check_moe(script: str = "moe.py"):
    """On 2 ranks, and on 2 replicas of 2, moe.py must leave each rank its part of the experts, give
    every parameter the gradient of the mean loss, and save the model that one process trains; where
    a rank raises, the job must fail."""
    if waits := waits_for("9.10", script):
        return waits
    for case in CASES:
        with status(case.when):
            _judge(case.run(script), case)
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(CASES[0].run(script, FAILING_RANK))
    return ("2 ranks, and 2 replicas of 2, train as one process does; a rank has its part of the "
            "experts; when a rank fails, the job fails")


def _judge(run, case):
    run_end.judge_end(run, case.when)
    drawn_samples.judge(run, case.when, case.rows, EPOCHS, BATCH)
    [expected] = launch(train_on, drawn_by(run), partial(make_model, case.chosen, case.seed), False,
                        ranks=1, quiet=True)
    _judge_held(run, case, expected)
    _judge_start(run, case, expected)
    _judge_gradients(run, case, expected)
    run_end.judge_writer(run, case.when)
    _judge_saved(run, case, expected)


def _judge_held(run, case, expected):
    """A rank has 1/EP of the experts, and everything else."""
    for rank, record in enumerate(run.records):
        most = sum(case.own(name, tensor, rank).nbytes for name, tensor in expected.initial.items())
        held = max(step.held for step in record.steps)
        if held > most:
            raise Wrong(f"{case.when}: rank {rank} holds {held:,} bytes of parameters; with 1/"
                        f"{case.expert} of the experts they are {most:,}",
                        "keep_own_experts replaces the parameters of self.experts by this rank's "
                        "part; a slice is a view of all of them: clone it.", code="not_sharded")


def _judge_start(run, case, expected):
    """The first losses are those of the complete model: before any gradient counts."""
    for rank, record in enumerate(run.records):
        got, want = record.steps[0].batches[0].loss, expected.losses[0][rank]
        if got is not None and not abs(got - want) <= 2e-4 * abs(want):
            raise Wrong(f"{case.when}: rank {rank}: the first loss is {got:.5f}, that of one "
                        f"process {want:.5f}", "Which expert's weights compute which row? Rows "
                        "arrive sorted by the rank that sent them; outputs go back in the order "
                        "of arrival.",
                        code="wrong_loss")


def _judge_gradients(run, case, expected):
    """Invariant: before each step every gradient is that of the mean loss over all sequences."""
    for step, gradients in enumerate(expected.gradients):
        for rank, record in enumerate(run.records):
            for name, whole in gradients.items():
                want, got = case.own(name, whole, rank), record.steps[step].gradients.get(name)
                who = f"{case.when}, rank {rank}, step {step}: gradient of {name!r}"
                if got is None:
                    raise Wrong(f"{who}: there is none", code="gradient_missing")
                if not _close(got, want):
                    raise _wrong_gradient(who, name, got, want, case, expected.alone[rank], step)


def _close(got, want) -> bool:
    return got.shape == want.shape and bool(
        (got - want).norm() <= GRADIENT * want.norm() + 1e-7)


def _wrong_gradient(who, name, got, want, case, alone, step) -> Wrong:
    is_expert, first = ".experts." in name, step == 0
    hint = "Sum over the ranks that have a part of it, then divide by the number of all ranks."
    causes = (
        ("experts_doubled", is_expert and case.expert > 1, case.expert,
         f"it is {case.expert} times too large: averaged over its replicas, not over all ranks"),
        ("not_divided", True, case.ranks, f"it is {case.ranks} times too large: summed, and not "
                                          "divided"),
        ("divided_twice", True, 1 / case.ranks, f"it is 1/{case.ranks} of it: divided twice"))
    for code, applies, factor, words in causes:
        if applies and _close(got, factor * want):
            return Wrong(f"{who}: {words}", hint, code=code)
    if first and not is_expert and name in alone and _close(got, alone[name]):
        return Wrong(f"{who}: it is this rank's alone", hint, code="not_averaged")
    return Wrong(f"{who}: off by {float((got - want).norm() / want.norm()):.0%} of its norm", hint,
                 code="wrong_gradient")


def _judge_saved(run, case, expected):
    saved = run.metrics
    if not isinstance(saved, dict) or sorted(saved) != sorted(expected.parameters):
        others = (sorted(expected.parameters.keys() ^ saved.keys()) if isinstance(saved, dict)
                  else [])
        raise Wrong(f"{case.when}: the file of --checkpoint is not the model's state dict"
                    + (f": {listed(others[:2])}" if others else ""),
                    "full_state gathers it; rank 0 saves it.", code="unreadable_file")

    def norm(tensors):
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))

    away = {name: saved[name] - want if saved[name].shape == want.shape else want
            for name, want in expected.parameters.items()}
    way = norm(expected.initial[name] - want for name, want in expected.parameters.items())
    if not norm(away.values()) <= WAY * way:
        farthest = max(away, key=lambda name: away[name].norm().item())
        raise Wrong(f"{case.when}: the saved parameters are {norm(away.values()) / way:.0%} of the "
                    "way that training took away from those of one process, most of all in "
                    f"{farthest!r}", "All ranks take each step of the optimizer with the same "
                    "gradients; the experts are gathered in the order of the ranks.",
                    code="differs_from_reference")
