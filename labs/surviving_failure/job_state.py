"""Exercise 8.1: the complete training state of a job, so that one that was killed and resumed
equals one that never was, to the last bit."""

import io
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.fingerprints import HINTS, NONE, PARTS, fingerprint, unlike
from labs.surviving_failure.forgotten import (
    STEPS_AFTER_RESUME,
    load_with_gradients,
    without_moments,
)
from labs.surviving_failure.forgotten_chart import distance
from labs.surviving_failure.killed_runs import Answer, Kill, killed_and_resumed
from labs.surviving_failure.resumable_job import EPOCH, KINDS, ResumableJob, new_job
from labs.surviving_failure.scaffold import tensor_bytes, to_bytes
from labs.training.models import local_shard
from labs.workers import devices, processes
from labs.workers.launcher import launch

RANKS = 3  # on which states are compared; the jobs that are killed run on 2 and on 3
COMPARED_STEPS = 4  # steps that are compared after a state was loaded
STEPS = 10  # of the jobs that are killed
LARGEST = 1.45  # of what a rank holds; a tied weight that is saved twice is 1.25


@check("8.1")
def check_job_state(job_state: Callable, load_job_state: Callable, zero3: Callable):
    """job_state(job) on each rank: what it saves. load_job_state(job, state): puts it into a new
    job, on as many ranks. zero3: the student's strategy of notebook 03."""
    rng = new_generator()
    answer = Answer(job_state, load_job_state, zero3)
    on_ranks(_judge_states, answer, rng.randint(2, EPOCH - 1), world_sizes=(RANKS,), timeout=60)
    kills = 0
    for ranks, steps in ((2, (rng.randint(2, 4), rng.randint(7, 9))), (3, (EPOCH + 1,))):
        plan = [Kill(rng.randrange(ranks), step, rng.randrange(len(KINDS))) for step in steps]
        with processes.temporary_folder() as folder:
            curves = killed_and_resumed(answer, ranks, plan, STEPS, Path(folder))
        _judge_curves(curves, ranks, plan)
        kills += len(plan)
    return (f"DDP, FSDP2 and ZeRO-3 on 2 and 3 ranks, {kills} kills: all {STEPS} losses equal "
            "those of the job that was never interrupted, to the last bit")


def _judge_states(answer: Answer, early: int):
    for kind in KINDS:
        _Trial(kind, answer).run(early)


class _Trial:
    """On a rank: a job of one kind that is saved, and new ones that load its states."""

    def __init__(self, kind: str, answer: Answer):
        self.kind, self.answer = kind, answer
        self.losses, self.prints = {}, {}  # step -> of the job that goes on

    def run(self, early: int) -> None:
        """Saves in the middle of an epoch and at its end; loads both, and a state of a resumed job.
        """
        job = new_job(self.kind, zero3=self.answer.zero3)
        self._train(job, early)
        middle, kept = self._save(job)
        self._train(job, EPOCH - job.step)
        # Judged after further steps: a state that shares the job's tensors has changed by then.
        raise_on_all_ranks(kept.judge)
        boundary, _ = self._save(job)
        self._train(job, COMPARED_STEPS)
        for data, step in ((middle, early), (boundary, EPOCH)):
            self._compare_losses(self._load(data, step), step)
        resumed = self._load(middle, early)
        resumed.train(EPOCH - early)
        again, _ = self._save(resumed)
        self._compare_losses(self._load(again, EPOCH), EPOCH)

    def _where(self, step: int) -> str:
        return (f"{self.kind} on {dist.get_world_size()} ranks, rank {dist.get_rank()}, saved "
                f"after step {step}")

    def _train(self, job: ResumableJob, steps: int):
        for _ in range(steps):
            [loss] = job.train()
            self.losses[job.step], self.prints[job.step] = loss, fingerprint(job)

    def _save(self, job: ResumableJob) -> tuple[bytes, "_Kept"]:
        """The state in bytes; judges that it is this rank's and that the job is as before."""
        before = fingerprint(job)
        state = self.answer.job_state(job)
        data = raise_on_all_ranks(self._judge_state, state, job, before)
        return data, _Kept(state, self._where(job.step))

    def _judge_state(self, state, job, before) -> bytes:
        where = self._where(job.step)
        if state is None:
            raise Wrong(f"{where}: job_state returned nothing (None)",
                        "Each rank has random numbers, and under FSDP2 and ZeRO-3 shards, that no "
                        "other has: each returns its own.", code="nothing_returned")
        if changed := unlike(fingerprint(job), before):
            raise Wrong(f"{where}: job_state has changed {changed[0]}",
                        "Training continues after the save.", code="state_changed")
        held, saved = _held_bytes(job), _float_bytes(tree_leaves(state))  # bytes
        # Invariant: a rank saves its shards: the full state fits on no rank, and N ranks write it.
        if saved > LARGEST * held and self.kind != "DDP":
            raise Wrong(f"{where}: the state has {saved:,} bytes of parameters and moments, and "
                        f"the rank holds {held:,}", "Something gathers the other ranks' shards: "
                        "job.tensors() has this rank's shards.", code="full_tensor_gathered")
        try:
            return to_bytes(state)
        except Exception as error:
            raise Wrong(f"{where}: torch.save cannot write the state: {_first_line(error)}",
                        "Tensors, numbers, texts, and lists and dictionaries of them.",
                        code="cannot_be_saved") from None

    def _load(self, data: bytes, step: int) -> ResumableJob:
        """A new job that has loaded the state; judges each part of it."""
        # Another seed than the saved job's: what is not loaded differs from what was saved.
        job = new_job(self.kind, seed=step, zero3=self.answer.zero3)
        new = fingerprint(job)
        self.answer.load_job_state(job, torch.load(io.BytesIO(data), weights_only=False))
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, self.prints[step])
        raise_on_all_ranks(self._judge_loaded, fingerprint(job), new, by_rank, step)
        return job

    def _judge_loaded(self, found, new, by_rank, step):
        want = by_rank[dist.get_rank()]
        # Invariant: bit-equal parts. A forgotten schedule changes the losses of later steps only.
        parts = unlike(found, want)
        if not parts:
            return
        if all(found[part] == new[part] for part in PARTS if new[part] != want[part]):
            raise Wrong(f"{self._where(step)}: a new job that has loaded the state is as it was "
                        "before", "load_job_state(job, state) changes the job; what it returns is "
                        "not used.", code="nothing_loaded")
        part = parts[0]
        why = self._why(part, found[part], want[part], new[part], by_rank)
        raise Wrong(f"{self._where(step)}: a new job that has loaded the state differs in "
                    + ", ".join([f"{part} ({why})", *parts[1:]]), HINTS[part],
                    code=f"{parts[0].replace(' ', '_')}_not_restored")

    def _why(self, part, found, want, new, by_rank) -> str:
        if found == NONE:
            return "missing"
        ranks = [rank for rank, each in enumerate(by_rank) if each[part] == found]
        steps = [step for step, each in self.prints.items() if each[part] == found]
        if len(found) < 40:  # a number, which says it by itself
            return f"{found} instead of {want}"
        if found == new:
            return "what a new job begins with"
        if ranks:
            return f"that of rank {ranks[0]}"
        return f"that of step {steps[0]}" if steps else "something else"

    def _compare_losses(self, job: ResumableJob, step: int):
        """The next steps' losses, to the last bit."""
        raise_on_all_ranks(self._judge_losses, job.train(COMPARED_STEPS), step)

    def _judge_losses(self, losses, step):
        for number, loss in enumerate(losses[:max(self.losses) - step], step + 1):
            if loss != self.losses[number]:
                raise Wrong(f"{self._where(step)}: of the resumed job, the loss of step {number} "
                            f"is {loss:.9g}, and {self.losses[number]:.9g} without interruption",
                            "What was compared right after loading is equal: "
                            f"{', '.join(PARTS)}. What else does a step need?", code="wrong_loss")


class _Kept:
    """A state in memory, which the job's next steps must leave as it is."""

    def __init__(self, state: Any, where: str):
        self.state, self.where, self.before = state, where, _contents(state)

    def judge(self) -> None:
        """Raises Wrong if anything in the state has changed."""
        now = _contents(self.state)
        changed = [path for path, value in self.before.items() if now.get(path) != value]
        if changed:
            raise Wrong(f"{self.where}: the state has changed with the job's next step: "
                        f"state{changed[0]}", "It has the job's own tensors, which the optimizer "
                        "changes in place. Written while training continues, it is a mixture: "
                        "copy.deepcopy(state).", code="not_a_snapshot")


def _contents(state) -> dict[str, Any]:
    """Path -> a copy of each leaf."""
    return {keystr(path): _copied(leaf) for path, leaf in tree_flatten_with_path(state)[0]}


def _copied(leaf):
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return tensor_bytes(leaf)


def _held_bytes(job) -> int:
    moments = [value for state in job.optimizer.state.values() for value in state.values()]
    return _float_bytes([*job.tensors().values(), *moments])


def _float_bytes(values) -> int:
    return sum(local_shard(value).nbytes for value in values
               if isinstance(value, torch.Tensor) and value.is_floating_point())


def _first_line(error) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _judge_curves(by_rank, ranks, plan):
    """The losses of killed and resumed jobs are those of jobs that never were."""
    # Catches a state that refers to objects of the process that saved it: these are gone here.
    for rank, (resumed, uninterrupted) in enumerate(by_rank):
        for kind, want in uninterrupted.items():
            got = resumed[kind]
            if len(got) != len(want):
                raise Wrong(f"{kind} on {ranks} ranks: the resumed job has trained {len(got)} "
                            f"steps, and {len(want)} without interruption", HINTS["step"],
                            code="wrong_count")
            for step, (loss, right) in enumerate(zip(got, want, strict=True), 1):
                if loss != right:
                    killed = " and ".join(str(kill.step) for kill in plan)
                    raise Wrong(f"{kind} on {ranks} ranks, rank {rank}, killed in step {killed}: "
                                f"the loss of step {step} is {loss:.9g}, and {right:.9g} without "
                                "interruption", "A new process has nothing but the file.",
                                code="wrong_loss")


# gloo cannot gather the shards of ranks that share a GPU (pytorch 132471), and 6 ranks share one.
ON_CPU = devices.on("cpu")
SHOWN_RANKS = 2
SHOWN_STEPS, KILLED_IN = 30, (8, 14, 23)
_MOMENTS = "moments forgotten at the first kill"


@shows("8.1")
def show_resumed(job_state: Callable, load_job_state: Callable) -> Picture:
    """Draws the losses of a job that was killed three times and resumed by the student's functions,
    over those of one that never was; and their difference, with that of a job whose moments were
    forgotten."""
    answer, rng = Answer(job_state, load_job_state, None), new_generator()
    kills = [Kill(rng.randrange(SHOWN_RANKS), step, 0) for step in KILLED_IN]
    with processes.temporary_folder() as folder:
        by_rank = killed_and_resumed(answer, SHOWN_RANKS, kills, SHOWN_STEPS, Path(folder),
                                     ("DDP",))
        forgetful = launch(without_moments, answer, Path(folder, "DDP"), KILLED_IN[0] - 1,
                           SHOWN_STEPS, ranks=SHOWN_RANKS, quiet=True)
    resumed, uninterrupted = (_mean([curves[number]["DDP"] for curves in by_rank])
                              for number in range(2))
    forgotten = _mean(forgetful)
    apart = [got - want for got, want in zip(resumed, uninterrupted, strict=True)]
    lost = [got - want for got, want in
            zip(forgotten, uninterrupted[-len(forgotten):], strict=True)]
    largest = max(map(abs, lost))
    lesson = (f"Resumed, a loss differs by at most {max(map(abs, apart)):g}; with {_MOMENTS} by "
              f"{largest:.2g}")
    words = (f"{lesson}\n{SHOWN_STEPS} steps on {SHOWN_RANKS} ranks, killed in steps "
             f"{', '.join(map(str, KILLED_IN))}")
    return Picture(_draw(lesson, resumed, uninterrupted, forgotten, apart, lost), words,
                   data=(resumed, uninterrupted, forgotten))


@shows("8.2")
@ON_CPU
def show_stale_gradient(save_dcp: Callable, load_dcp: Callable) -> Table:
    """The same for FSDP2 through DCP, loaded into a new job, and into one whose parameters have
    gradients when `get_state_dict` is called."""
    with processes.temporary_folder() as folder:
        [found, *_] = launch(load_with_gradients, save_dcp, load_dcp, Path(folder),
                             ranks=SHOWN_RANKS, quiet=True)
    rows = [(what, *(distance(difference) for difference in differences))
            for what, differences in found.items()]
    return Table(f"FSDP2, {SHOWN_RANKS} ranks: how far each loss is from that of the job that "
                 "continued",
                 ("the new job has", *losses_of(STEPS_AFTER_RESUME)), rows)


def losses_of(count) -> list[str]:
    return [f"loss {step}" for step in range(1, count + 1)]


def _mean(by_rank) -> list[float]:
    return [fmean(losses) for losses in zip(*by_rank, strict=True)]


def _draw(lesson, resumed, uninterrupted, forgotten, apart, lost):
    figure, (above, below) = canvas(WIDTH, 4.6 + marks.HEADLINE, nrows=2, sharex=True,
                                    gridspec_kw={"height_ratios": (3, 2)})
    marks.headline(figure, lesson)
    steps = range(1, SHOWN_STEPS + 1)
    above.plot(steps, uninterrupted, color=palette.PREDICTED, linewidth=6, alpha=0.35,
               solid_capstyle="round")
    for begin, end in zip((1, *KILLED_IN), (*KILLED_IN, SHOWN_STEPS + 1), strict=True):
        above.plot(range(begin, end), resumed[begin - 1:end - 1], "o-", color=palette.RUNS[1],
                   markersize=4, linewidth=1.4)
    after = range(SHOWN_STEPS - len(lost) + 1, SHOWN_STEPS + 1)
    above.plot(after, forgotten, "s-", color=palette.RUNS[2], markersize=3, linewidth=1)
    below.axhline(0, color=palette.RULE, linewidth=1)
    below.plot(after, lost, "s-", color=palette.RUNS[2], markersize=3.5, linewidth=1.2)
    below.plot(steps, apart, "o-", color=palette.RUNS[1], markersize=4, linewidth=1.4)
    for ax in (above, below):
        for step in KILLED_IN:
            ax.axvline(step - 0.5, color=palette.DARKEST, linewidth=1, linestyle=(0, (4, 3)))
        ax.grid(axis="y", color=palette.GRID)
    above.set_ylabel("loss, mean of the ranks")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    marks.legend_above(figure, [
        Line2D([], [], color=palette.PREDICTED, linewidth=6, alpha=0.35, label="never interrupted"),
        Line2D([], [], color=palette.RUNS[1], marker="o", markersize=4,
               label="killed and resumed"),
        Line2D([], [], color=palette.RUNS[2], marker="s", markersize=3.5, label=_MOMENTS),
        Line2D([], [], color=palette.DARKEST, linewidth=1, linestyle=(0, (4, 3)),
               label="a rank is killed")])
    return figure
