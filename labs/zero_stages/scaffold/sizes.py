"""The bytes of model states that each ZeRO stage leaves on a rank."""

from labs.predictions.memory_recipes import model_states

STATES_RECIPE = "bf16, fp32 master"  # K = 12: 16 bytes per parameter, as in the ZeRO paper


def state_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of parameters, gradients and optimizer state of one rank, in bf16 with an fp32 master
    copy; stage 0 is DDP."""
    return model_states(parameters, STATES_RECIPE, ranks=ranks, stage=stage).total
