"""How published code bases compute and what they keep, where their rows do not say.

Settings and kernels are what the code did at the time of its figures, with the file that says so.
Rates, and bytes that no file gives, were fitted on rows of `labs.predictions.gpu_runs`, which says
how far they are off on rows that they were not fitted to.
"""

from dataclasses import dataclass, field, replace

from labs.predictions.memory.recipes import Recipe
from labs.predictions.step_time.constants import FITTED, Constants, Overheads


@dataclass(frozen=True)
class Kept:
    """What a code base keeps on a rank beside the states of its recipe.

    hidden, key, mlp: copies, in 16 bits, of the residual stream, of the keys' width and of the
        MLP's that a layer saves for backward; hidden 0: as `labs.predictions.plans.memory` counts
        them for the family.
    gathered: copies of the residual stream, not cut over tensor-parallel ranks, that a layer saves
        where there is no pipeline. steady: the same in a pipeline with more micro-batches than
        stages, of one micro-batch, up to 4 tensor-parallel ranks (with more, half of the rows have
        it). buffers: the same of one layer, in any plan.
    logit: bytes for each logit at the peak of the loss. held: further ones of the micro-batch
        before, which a variable of the training loop still holds.
    plain_mlp: `mlp` where the MLP is not gated. backward: bytes for each logit that come on top
        while every layer's activations are kept.
    layers, root: under FSDP, how many layers' worth of 16-bit parameters, gathered and as
        gradients, are there at the peak, and how much of the embedding and the head; reduced: how
        much of those when their gradients are reduced.
    is_phased: whether the loss, the backward of a recomputed layer, the last reduction and the
        optimizer's step are told apart, and the largest counts: else all parts are added.
    dispatched: copies of the residual stream, for each expert that a token uses, that a layer with
        experts saves beside its MLP's: two by the formula, the inputs in the order of the experts
        and their outputs. A fitted number also stands for uneven routing, casts and gradients.
    fixed: bytes, whatever the job: workspaces, and what the allocator reserves beyond its tensors.
    """

    hidden: float = 0.0
    key: float = 0.0
    mlp: float = 0.0
    gathered: float = 0.0
    steady: float = 0.0
    buffers: float = 0.0
    logit: float = 12.0
    backward: float = 0.0
    plain_mlp: float = 0.0
    layers: float = 0.0
    root: float = 0.0
    reduced: float = 0.0
    is_phased: bool = False
    held: float = 0.0
    dispatched: float = 2.0
    fixed: float = 0.0


@dataclass(frozen=True)
class CodeBase:
    """flash, fused, loss_bytes, early_stop: as in `TrainingRun`. chunks: (layers, pipeline stages)
    -> chunks of layers on each stage, for the runs that interleave. recipe: bytes of states for
    each parameter. constants, overheads: what its seconds were fitted with. stages: "equal", or
    "by cost": each stage of a pipeline has as many products as the next, the head's counted."""

    name: str
    flash: int
    fused: bool
    loss_bytes: int
    early_stop: bool
    chunks: dict[tuple[int, int], int] = field(default_factory=dict, hash=False)
    recipe: str | Recipe = "megatron"
    kept: Kept = Kept()
    constants: Constants = FITTED
    overheads: Overheads = Overheads()
    stages: str = "equal"


FUSED_LOSS = 8  # bytes per logit: written and read in 16 bits, and so are their gradients
EAGER_LOSS = 28  # cast to fp32, log-softmax and both gradients, each read and written

# attn_impl "triton", FlashAttention 1 in Triton, and torch 1.13: its checkpoints recompute all
# (scripts/train/benchmarking/submit_benchmarks.py); fused_crossentropy is the models' default.
LLM_FOUNDRY = CodeBase("llm-foundry", flash=1, fused=False, loss_bytes=FUSED_LOSS, early_stop=False)

# Scaled-dot-product attention of torch 2.6, which is FlashAttention 2.
TORCHTITAN = CodeBase("torchtitan", flash=2, fused=False, loss_bytes=EAGER_LOSS, early_stop=True)

# Before FlashAttention; bias + GELU, bias + dropout + addition and the softmax are fused. Chunks:
# examples/sc21/run_table_1.sh (layers per virtual stage) and Korthikanti et al., section 6.2.
MEGATRON = CodeBase("Megatron-LM", flash=0, fused=True, loss_bytes=EAGER_LOSS, early_stop=False,
                    chunks={(60, 4): 3, (80, 8): 2, (96, 16): 2, (105, 35): 3, (96, 8): 3})

# Eager kernels on H100s, as nanotron's rows have them: FITTED's rows on H100s are compiled ones of
# torchtitan in the main.
EAGER = replace(FITTED, matmul_h100=0.625, half_size=155, traffic=3.35)

# nanotron v0.5: eager kernels, parameters and gradients in bf16 beside fp32 ones, and stages cut by
# cost. Its layer keeps 14 copies of the residual stream and 3 of the MLP's width.
NANOTRON = CodeBase(
    "nanotron", flash=2, fused=False, loss_bytes=44, early_stop=False, stages="by cost",
    recipe=Recipe("nanotron", 2, 2 + 4, 12, compute=2),
    kept=Kept(hidden=14, mlp=3, gathered=1.65, steady=5, buffers=4.7, logit=7.2, held=3.9,
              fixed=0.3e9),
    constants=EAGER,
    overheads=Overheads(
        launch=4.37e-3, pipelined=0.42e-3, pipelined_rank=2.0e-3, pipelined_nodes=0.395,
        hop=4.43e-6, gradient_hop=676e-6, activation_share=0.424, gradient_share=0.46, spread=0.206,
        exposed=0.385, stall=0.43))

# Megatron-Core with Transformer Engine: fused kernels, cross-entropy in place of the fp32 logits.
# `dispatched` and `experts` were fitted to its 76 and 56 rows with experts. Fitted without a test,
# its memory is 1.9 % off (median of the rows; with the formula's 2 copies 5.1 %) and its seconds
# 6.7 % (with the launches of a dense layer 34 %).
MEGATRON_CORE = CodeBase("Megatron-Core", flash=2, fused=True, loss_bytes=EAGER_LOSS,
                         early_stop=False, kept=Kept(logit=6.0, dispatched=6.2, fixed=0.07e9),
                         overheads=Overheads(launch=4.55e-3, experts=2.75e-3, step=0.012))

# prime-rl: FSDP2 of fp32 parameters, compiled, every layer recomputed. Its fine-tuning computes the
# loss of whole logits. Its reinforcement learning computes them in pieces, twice, with some 30
# operations in fp32 (trainer/models/layers/lm_head.py @bdfbfae98): 130 bytes a logit. `dispatched`
# is of the one layer that is recomputed: fitted with LoRA and tried without, and the reverse, the
# rows with experts are 4.1 % off (median of 10).
PRIME_RL = CodeBase("prime-rl", flash=3, fused=False, loss_bytes=130, early_stop=True,
                    recipe="bf16 policy", kept=Kept(logit=0.6, dispatched=12.8, fixed=1e9),
                    constants=EAGER, overheads=Overheads(launch=4.6e-3, experts=2.75e-3))
PRIME_RL_SFT = replace(PRIME_RL, loss_bytes=60, kept=replace(PRIME_RL.kept, logit=18.0))

# What a plan computes with where no code base is named. The host starts a layer in what it takes in
# the two code bases that were fitted, 4.4 and 4.55 ms, and one with experts in what it takes in
# Megatron-Core.
PYTORCH = CodeBase("PyTorch, compiled", flash=2, fused=True, loss_bytes=EAGER_LOSS,
                   early_stop=False, overheads=Overheads(launch=4.6e-3, experts=2.75e-3))
# Eager: what transformers' blocks save under FSDP2 and DDP, so that the bytes are within 7 % of
# those that labs.predictions.memory.predict counts (tests/predictions/test_planned_memory.py).
PYTORCH_EAGER = replace(
    PYTORCH, name="PyTorch, eager", fused=False, loss_bytes=44, early_stop=True, constants=EAGER,
    kept=Kept(hidden=9.6, key=3, mlp=3, plain_mlp=4.1, logit=12.8, backward=5.2, layers=5.4,
              root=0.65, reduced=3.2, is_phased=True))

CODE_BASES = {code.name: code for code in (
    PYTORCH_EAGER, PYTORCH, NANOTRON, MEGATRON_CORE, PRIME_RL, TORCHTITAN)}
"""Name -> code base that a job can be planned for."""

_IN_SOURCE = {"llm-foundry": LLM_FOUNDRY, "torchtitan": TORCHTITAN, "Megatron-LM": MEGATRON,
              "2104.04473": MEGATRON, "2205.05198": MEGATRON}


def code_base(source: str) -> CodeBase:
    """The code base of a row from its `source`. One that is not in the table is named after the
    source's first word and computes as current PyTorch does."""
    for mark, found in _IN_SOURCE.items():
        if mark in source:
            return found
    return CodeBase((source.split() or ["unknown"])[0], flash=2, fused=False,
                    loss_bytes=EAGER_LOSS, early_stop=True)
