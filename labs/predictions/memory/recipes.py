"""Bytes per parameter by training recipe, and per rank by ZeRO stage. All results in bytes.

Sources: Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054), sections 3.1 and 5 (K = 12 for
mixed-precision Adam, equations of figure 1); Megatron-LM, docs on the distributed optimizer (18
bytes per parameter, 6 + 12/N with it); torch.optim (what each optimizer keeps).
"""

from dataclasses import dataclass

from labs.training.memory_categories import Memory

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of what stays through a step; `compute` is the bytes of one element of
    the activations, and of a parameter that FSDP gathers."""

    name: str
    parameters: float
    gradients: float
    optimizer_state: float
    compute: int = 4
    optimizer: str = "AdamW"

    @property
    def total(self) -> float:
        """Bytes per parameter of model states together."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def mixed(self) -> bool:
        """Whether forward computes in fewer bytes than the parameters are kept in."""
        return self.compute < self.parameters


RECIPES = {recipe.name: recipe for recipe in (
    Recipe("fp32", 4, 4, 8),
    Recipe("bf16", 2, 2, 4, compute=2),
    Recipe("bf16, fp32 moments", 2, 2, 8, compute=2),
    Recipe("bf16, fp32 master", 2, 2, 12, compute=2),
    Recipe("bf16 policy", 4, 4, 8, compute=2),
    Recipe("megatron", 2, 4, 12, compute=2),
    Recipe("bf16, 8-bit moments", 2, 2, 2 + 2 * 4 / 256, compute=2, optimizer="8-bit AdamW"),
    Recipe("fp32 momentum", 4, 4, 4, optimizer="SGD with momentum"),
    Recipe("fp32 sgd", 4, 4, 0, optimizer="SGD"),
    Recipe("bf16 sgd", 2, 2, 0, compute=2, optimizer="SGD"),
    Recipe("bf16 sgd, fp32 master", 2, 2, 4, compute=2, optimizer="SGD"),
)}
"""Recipe name -> Recipe.

"bf16" is `model.bfloat16()` under torch.optim.AdamW: the moments take the parameters' type.
"bf16, fp32 moments" keeps two fp32 moments but no master copy. "bf16, fp32 master" is mixed
precision as in the ZeRO paper: K = 12. "bf16 policy" is FSDP2's MixedPrecisionPolicy(param_dtype=
bfloat16, reduce_dtype=float32): everything that stays is fp32, only gathered copies are bf16.
"bf16, 8-bit moments" is bitsandbytes' AdamW8bit: a byte for each moment, and an fp32 scale for each
256 of them (it keeps the moments of tensors below 4096 elements in fp32: not counted).
"megatron" accumulates gradients in fp32: 2 + 4 + 12 = 18.
"""


def recipe_of(recipe: str | Recipe) -> Recipe:
    """The recipe with this name (or a `Recipe`, which is returned as it is)."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}: choose {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]


def model_states(parameters: float, recipe: str | Recipe = "fp32", *, ranks: int = 1,
                 stage: int = 0) -> Memory:
    """Bytes of parameters, gradients and optimizer state that one rank stores under ZeRO `stage`.

    Stage 1 shards the optimizer state over `ranks`, 2 the gradients too, 3 the parameters too; 0 is
    plain data parallelism. Sharded evenly, as in the paper: `memory_shards` counts with padding.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3; 0 is none")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 rank is needed")
    chosen = recipe_of(recipe)
    shares = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    each = (chosen.parameters, chosen.gradients, chosen.optimizer_state)
    return Memory(*(parameters * size / share for size, share in zip(each, shares, strict=True)))
