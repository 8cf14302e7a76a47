"""In a rank that a check has started: runs the script as Python would, and notes what its model is
trained on, with which losses, gradients and learning rates, and which files the rank writes."""

import atexit
import builtins
import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labs.meters.collective_hooks import CollectiveObserver, IssuedCollective
from labs.meters.evidence import storage_bytes
from labs.training import models
from labs.workers import devices, reports, worker
from labs.workers.programs import note

FAILS_AT = 2  # the batch at which a rank that is to fail raises


@dataclass
class Batch:
    """Sequences that went forward together. rows: tokens, (number, context). loss: the model's,
    None where it was given no labels."""

    rows: torch.Tensor
    loss: float | None


@dataclass
class Step:
    """What one optimizer step was made of. gradients: as they lay on this rank. owned: the names of
    the parameters that the optimizer has. held: the bytes of parameters that this rank held just
    before, whole ones and shards. began: when the first forward of its batches did; stepped: when
    the optimizer's step did. Both on the clock of RankRecord."""

    batches: list[Batch]
    learning_rate: float
    gradients: dict[str, torch.Tensor]
    owned: list[str]
    held: int
    began: float
    stepped: float


@dataclass
class RankRecord:
    """What a rank did. parameters: at its end, or the rank's shards where `sharded`.
    optimizer_state: bytes of what the optimizers keep for the numbers of parameters. shards: of a
    sharded parameter the dimension that is cut, which piece is here, and into how many. gathered:
    bytes and ranks of the group of each all-gather. scattered: bytes and type of what each
    reduce-scatter left. calls: kind and bytes of each collective, in order. blocks: how often a
    block of the model ran, again in backward too. written: the files that it opened to write.
    error: (type, message, line of the script) of what it raised. started, ended: when the script
    did, in seconds on `time.perf_counter`."""

    steps: list[Step] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer_state: int = 0
    sharded: bool = False
    shards: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    gathered: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    scattered: list[tuple[int, str]] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    blocks: int = 0
    written: list[str] = field(default_factory=list)
    error: tuple[str, str, int] | None = None
    started: float = 0.0
    ended: float = 0.0

    def save(self, path: str) -> None:
        """Writes it as tensors, lists and dicts, so that reading it runs no code."""
        torch.save(asdict(self), path)

    @classmethod
    def load(cls, path: Path | str) -> "RankRecord":
        """Reads what `save` wrote. Raises an exception of any kind where that is not there."""
        # weights_only: the record is written by a process that runs a student's code.
        fields = torch.load(path, weights_only=True)
        steps = [Step(**{**step, "batches": [Batch(**batch) for batch in step["batches"]]})
                 for step in fields.pop("steps")]
        return cls(steps, **fields)


@dataclass(frozen=True)
class RankStart:
    """What a rank begins with. folder: where it works. notes: the folder for what it notes and
    prints. fails: it raises in the forward of its batch FAILS_AT."""

    script: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    notes: str
    threads: int = 1
    fails: bool = False


def main(start: RankStart) -> None:
    """Is a rank that torchrun would have started; never returns."""
    become(start)
    rank = start.environment["RANK"]
    probe = _Probe(start.notes, start.fails)
    try:
        with probe.installed():
            code, probe.record.error = run_script(start.script)
    finally:
        probe.finished_record().save(f"{start.notes}/record-{rank}.pt")
    leave(code)


def become(start: RankStart) -> None:
    """Turns this process into the rank: its environment, folder, output and arguments."""
    worker.die_with_caller()
    _redirect(f"{start.notes}/output-{start.environment['RANK']}")
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    torch.set_num_threads(start.threads)
    multiprocessing.set_start_method(None, force=True)  # for a DataLoader: the platform's default
    sys.argv = [start.script, *start.arguments]
    sys.path.insert(0, os.path.dirname(start.script))
    reports.Reporter(start.notes, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]),
                     "nccl" if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "").start()


def leave(code: int) -> None:
    """Ends the process as Python does at the end of a script."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # Python waits for the script's threads
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _redirect(path):
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", errors="replace",
                                closefd=False))
    sys.stdin = open(os.devnull)


def run_script(script: str) -> tuple[int, tuple[str, str, int] | None]:
    """Runs the script to its end; returns the exit code that Python would have, and (type, message,
    line of the script) of what it raised."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        # The kernel keeps the lowest 8 bits of an exit code.
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF, None
        print(error.code, file=sys.stderr)
        return 1, None
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == script]
        at = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        traceback.print_exc()
        return 1, (type(error).__name__, str(error)[:1000], lines[-1] if lines else at or 0)
    return 0, None


class _Probe(CollectiveObserver):
    """Notes what the rank does while it is `installed`."""

    def __init__(self, notes: str, fails: bool):
        self.record, self._notes, self._fails = RankRecord(), notes, fails
        self._model: nn.Module | None = None
        self._pending: list[Batch] = []
        self._batches, self._began = 0, 0.0
        self._optimizers, self._stepping = [], 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        from transformers import GPT2LMHeadModel, LlamaForCausalLM
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        # A hook of all optimizers: the script makes its optimizer itself, of any class.
        hook = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        with contextlib.ExitStack() as stack:
            stack.callback(hook.remove)
            stack.callback(after.remove)
            for model in (GPT2LMHeadModel, LlamaForCausalLM):
                stack.enter_context(mock.patch.object(model, "forward",
                                                      self._noting(model.forward)))
            stack.enter_context(mock.patch.object(
                GPT2Block, "forward", self._counting(GPT2Block.forward)))
            stack.enter_context(mock.patch.object(
                dist, "destroy_process_group", _after_a_pause(dist.destroy_process_group)))
            # pathlib calls io.open, a script the built-in one
            for module, original in ((builtins, builtins.open), (io, io.open)):
                stack.enter_context(mock.patch.object(module, "open", self._opening(original)))
            stack.enter_context(mock.patch.object(torch, "save", self._saving(torch.save)))
            if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
                stack.enter_context(devices.meshes_on_cpu())
            stack.enter_context(self)
            self.record.started = time.perf_counter()
            yield

    def _noting(self, original) -> Callable:
        def forward(model, input_ids=None, *args, **kwargs):
            # A validation pass is no part of a training step.
            if not torch.is_grad_enabled():
                return original(model, input_ids, *args, **kwargs)
            if not self._pending:
                self._began = time.perf_counter()
            self._model, self._batches = model, self._batches + 1
            note(self._notes, "batch", os.environ["RANK"], len(input_ids))
            # Not in the first batch: ranks must be inside the training loop, with collectives
            # behind them.
            if self._fails and self._batches == FAILS_AT:
                raise RuntimeError(f"raised on rank {os.environ['RANK']} on purpose, by the check")
            result = original(model, input_ids, *args, **kwargs)
            loss = getattr(result, "loss", None)
            # rows: (sequences, context) on the CPU; a copy, because a script may reuse its batch's
            # memory
            self._pending.append(Batch(input_ids.detach().cpu().clone(),
                                       None if loss is None else loss.item()))
            return result

        return forward

    def _counting(self, original) -> Callable:
        def forward(*args, **kwargs):
            self.record.blocks += 1
            return original(*args, **kwargs)

        return forward

    def _after_step(self, optimizer, args, kwargs):
        self._stepping -= 1

    def _before_step(self, optimizer, args, kwargs):
        now, self._stepping = time.perf_counter(), self._stepping + 1
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in self._named() if id(p) in owned]
        if not self._pending and optimizer.param_groups[0]["lr"] == 0:
            return  # get_state_dict's: it lets a new optimizer make its moments by a step with lr 0
        if self._stepping > 1:  # the step of an optimizer that calls another one's, as
            self.record.steps[-1].owned = names  # torch's ZeroRedundancyOptimizer does
            return
        gradients = {name: _local(p.grad) for name, p in self._named() if p.grad is not None}
        # The optimizer's parameters too: an optimizer may own shards that the model does not have.
        held = storage_bytes([*(self._model.parameters() if self._model else ()),
                              *(p for group in optimizer.param_groups for p in group["params"])])
        self.record.steps.append(Step(self._pending, float(optimizer.param_groups[0]["lr"]),
                                      gradients, names, held, self._began, now))
        self._pending = []

    def _opening(self, original) -> Callable:
        def opened(file, mode="r", *args, **kwargs):
            # Only names: a number is a file descriptor that is open already.
            if isinstance(file, str | os.PathLike) and set(mode) & set("wax+"):
                path = str(Path(file).absolute())
                # The probe's own notes are no files of the script.
                if not path.startswith(self._notes):
                    self.record.written.append(path)
            return original(file, mode, *args, **kwargs)

        return opened

    def _saving(self, original) -> Callable:
        # given a path, torch.save opens the file in C++
        def save(value, file, *args, **kwargs):
            if isinstance(file, str | os.PathLike):
                self.record.written.append(str(Path(file).absolute()))
            return original(value, file, *args, **kwargs)

        return save

    def before(self, collective: IssuedCollective) -> None:
        note(self._notes, "called", os.environ["RANK"], collective.kind)
        self.record.calls.append((collective.kind, sum(
            tensor.nbytes for tensor in collective.outputs or collective.inputs)))
        if collective.kind == "reduce_scatter":
            self.record.scattered += [(tensor.nbytes, str(tensor.dtype).removeprefix("torch."))
                                      for tensor in collective.outputs]
        if collective.kind == "all_gather":
            self.record.gathered.append((sum(tensor.nbytes for tensor in collective.outputs),
                                         collective.members))

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The model's parameters, by the names that they have without checkpointing."""
        return [(name.replace("_checkpoint_wrapped_module.", ""), parameter)
                for name, parameter in (self._model.named_parameters() if self._model else ())]

    def finished_record(self) -> RankRecord:
        """The record with the parameters as they are at the end."""
        self.record.ended = time.perf_counter()
        self.record.optimizer_state = storage_bytes(
            [value for optimizer in self._optimizers for state in optimizer.state.values()
             for value in state.values() if isinstance(value, torch.Tensor) and value.dim()])
        if self._model is not None:
            named = dict(self._named())
            self.record.parameters = {name: _local(p) for name, p in named.items()}
            self.record.sharded = any(isinstance(p, DTensor) for p in named.values())
            self.record.shards = {name: cut for name, p in named.items() if (cut := _cut(p))}
        return self.record


def _after_a_pause(destroy) -> Callable:
    """torch 2.13 deadlocks where gloo's thread still drops its reference to a tensor, for which it
    needs the interpreter, while DDP's destructor holds the interpreter and joins that thread."""
    def paused(*args, **kwargs):
        time.sleep(0.2)
        return destroy(*args, **kwargs)

    return paused


def _cut(tensor) -> tuple[int, int, int] | None:
    """(dimension, piece, pieces) of a tensor that is cut along one dimension, else None."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    cuts = [(placement.dim, piece, pieces) for placement, piece, pieces in zip(
        placements, tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, strict=True)
        if placement.is_shard()] if placements else []
    return cuts[0] if len(cuts) == 1 else None


def _local(tensor) -> torch.Tensor:
    """What this rank holds of it, on the CPU."""
    return models.local_shard(tensor).detach().cpu().clone()
