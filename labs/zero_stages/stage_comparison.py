"""The student's stages compared with DDP and the real libraries; what each is expected to hold and
to send is data of this notebook."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from labs.exercises.comparison import Comparison, compare, model_of
from labs.exercises.verdicts import shows
from labs.predictions.memory import predict
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
from labs.training import strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset


@dataclass(frozen=True)
class Expected:
    """What a strategy is expected to hold and to send.

    stage: of ZeRO, 0 for DDP; it holds the states of that stage. sends: collective -> how often all
    Ψ elements go through it in a step. gathered: bytes of a parameter's element as it travels.
    options: of labs.predictions.memory.predict, which knows every phase of a step of torch's own
    strategies; None for the others.
    """

    stage: int
    sends: dict[str, int]
    gathered: int = 4
    options: dict | None = None

    def communication_volume(self) -> float:
        """How many Ψ a step sends, an all-reduce counted twice; each rank sends (N-1)/N of it."""
        return sum(passes(kind) * often for kind, often in self.sends.items())

    def bytes(self, parameters: int) -> float:
        """The same in bytes."""
        sizes = {"all_gather": self.gathered}
        return parameters * sum(passes(kind) * often * sizes.get(kind, 4)
                                for kind, often in self.sends.items())

    def states(self, comparison: Comparison) -> Memory:
        """Bytes of parameters, gradients and optimizer state of one rank, in fp32 with AdamW."""
        return model_states(comparison.parameters, ranks=comparison.preset.ranks, stage=self.stage)

    def memory(self, comparison: Comparison, moment: str) -> Memory | None:
        """All that a rank holds at the end of a phase or at the "peak" of a step; None for a
        strategy whose steps cannot be predicted."""
        if self.options is None:
            return None
        preset = comparison.preset
        return predict(model_of(preset).config, batch=preset.batch, sequence=preset.context,
                       ranks=preset.ranks, **self.options)[moment]


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
    "DeepSpeed 3": Expected(3, stage_passes(3)),
}


def expected(name: str) -> Expected:
    """What the strategy with this name in a comparison is expected to do. A student's has its stage
    in its name; raises ValueError if it has not."""
    if name in _EXPECTED:
        return _EXPECTED[name]
    digit = re.search(r"[123]", name)
    if not digit:
        raise ValueError(f"{name!r} does not say which stage it is: name it, say, 'ZeRO-2'")
    return Expected(int(digit[0]), stage_passes(int(digit[0])))


@shows("3.8")
def compare_stages(mine: Mapping[str, Callable], preset: Preset) -> Comparison:
    """Trains DDP, every strategy of `mine` (name -> strategy; the digit in the name is its stage)
    and those of the libraries that are installed, and records what each holds and sends.

    Each rank has one sequence, so that activations, which no stage divides, do not hide the rest.
    """
    for name in mine:
        expected(name)  # a name without a stage is refused before anything runs
    return compare({"DDP": strategies.ddp, **mine, **_libraries()}, replace(preset, batch=1))


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
