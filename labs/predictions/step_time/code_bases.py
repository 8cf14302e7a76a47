"""How published code bases compute, where their rows do not say: settings and kernels, no rates.

Each is what the code did at the time of its figures, with the file that says so.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CodeBase:
    """flash, fused, loss_bytes, early_stop: as in `TrainingRun`. chunks: (layers, pipeline stages)
    -> chunks of layers on each stage, for the runs that interleave."""

    name: str
    flash: int
    fused: bool
    loss_bytes: int
    early_stop: bool
    chunks: dict[tuple[int, int], int] = field(default_factory=dict)


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
