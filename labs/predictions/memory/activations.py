"""What forward saves for backward. All results in bytes.

Two readings. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022 (arXiv 2205.05198), in closed form: a GPT layer in 16 bits with dropout and Megatron's fused
kernels. And what torch and transformers really save, from a recorded step: `saved`, which the tests
compare with autograd's own list of saved tensors, to the byte.
"""

from labs.predictions.memory.recipes import Recipe, recipe_of

_LOSS = 4  # bytes: the loss itself is held too, but not by autograd


def korthikanti(batch: int, sequence: int, hidden: int, heads: int, *, tensor_parallel: int = 1,
                sequence_parallel: bool = False, recompute: str = "none") -> float:
    """Bytes saved by one GPT layer in 16 bits (section 4, equations 1, 2 and 4, table 2).

    sbh(34 + 5as/h); over t tensor-parallel ranks sbh(10 + 24/t + 5as/(ht)), with sequence
    parallelism sbh/t·(34 + 5as/h). recompute "selective" leaves out attention's 5as/h, "full" all
    but the layer's input, 2sbh. These are bytes, not elements: often multiplied by 2 in error.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"no recompute {recompute!r}: choose none, selective or full")
    size = sequence * batch * hidden
    if recompute == "full":
        return 2 * size
    scores = 0 if recompute == "selective" else 5 * heads * sequence / hidden
    whole = 34 if sequence_parallel else 10 + 24 / tensor_parallel
    share = tensor_parallel if sequence_parallel else 1
    return size * (whole / share + scores / tensor_parallel)


def copies(bytes_saved: float, batch: int, sequence: int, hidden: int) -> float:
    """Saved bytes of a layer in units of the 16-bit residual stream, 2sbh."""
    return bytes_saved / (2 * batch * sequence * hidden)


def saved(config, *, batch: int, sequence: int, recipe: str | Recipe = "fp32",
          attention: str = "sdpa", device: str = "cpu") -> dict[str, float]:
    """Part -> bytes that autograd keeps at the end of forward, without checkpointing: "embedding",
    "blocks", "head" (with the final norm and the loss)."""
    # importing the recorder takes torch two seconds, and closed forms are asked for without it
    from labs.predictions.memory.recorder import Mode
    from labs.predictions.memory.scaled_step import Step

    mode = Mode(recipe_of(recipe).compute, "none", attention, device)
    found = Step(config, batch, sequence, mode).saved()
    return {"embedding": found["outside"], "blocks": found["blocks"],
            "head": found["head"] - _LOSS}
