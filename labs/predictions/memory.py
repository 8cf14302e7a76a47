"""What one rank holds through a training step, from a configuration alone. All results in bytes.

The step is played on a tape of names and bytes, one formula per tensor, so that every category and
the peak come out together: `predict`. What stays and what is saved has its own closed forms in
memory_recipes.py and activations.py.
"""

from labs.predictions import memory_gpt2, memory_llama, memory_strategies
from labs.predictions.memory_recipes import recipe_of
from labs.predictions.memory_sizes import Sizes, check
from labs.predictions.memory_tape import Tape
from labs.predictions.parameters import shape_of

CHECKPOINTING = ("none", "selective", "full")
PHASES = ("build", "forward", "backward", "step", "peak")
INPUTS = 8 + 8  # bytes of a token's number and of its label, int64
RNG_STATE = 5056  # bytes of the CPU generator's state that torch.utils.checkpoint keeps per block


def predict(config, *, batch: int, sequence: int, ranks: int = 1, rank: int = 0,
            strategy: str = "plain", reshard: bool = True, bucket_view: bool = False,
            wrap: str = "blocks", recipe="fp32", checkpointing: str = "none",
            attention: str = "sdpa", device: str = "cpu", backend: str = None,
            inputs: bool = False) -> dict:
    """Phase -> Memory (bytes by category) of one rank: after "build" (no optimizer state yet),
    "forward", "backward" and "step" of a later step, and at that step's "peak".

    config: of a GPT-2, Llama or Qwen2 from Hugging Face, or a `Shape`. batch: sequences per rank;
    sequence: tokens of each. strategy: one of STRATEGIES. recipe: one of RECIPES. backend: "gloo",
    whose collectives hold copies, or "nccl", whose do not; None: the one for the device. inputs:
    count the batch's tokens and labels too, as an allocator does.
    """
    tape, z = Tape(), _sizes(config, batch, sequence, recipe, checkpointing, attention, device)
    chosen = _strategy(tape, z, recipe, strategy, ranks, rank, reshard=reshard, wrap=wrap,
                       bucket_view=bucket_view, copies=_copies(backend, device))
    found = {}
    chosen.build()
    found["build"] = tape.snapshot()
    tape.add(other=INPUTS * z.tokens if inputs else 0)
    tape.add(optimizer_state=chosen.optimizer_state() + _steps(chosen, z))
    tape.start_peak()
    _forward(tape, z, chosen, checkpointing == "full")
    found["forward"] = tape.snapshot()
    _backward(tape, z, chosen, checkpointing == "full")
    found["backward"] = found["step"] = tape.snapshot()
    tape.temporary(_step_temporaries(chosen, z), "other")
    found["peak"] = tape.peak
    return found


def _sizes(config, batch, sequence, recipe, checkpointing, attention, device):
    check(attention, device, batch, sequence)
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"no checkpointing {checkpointing!r}: choose {', '.join(CHECKPOINTING)}")
    shape = shape_of(config)
    if 0 < shape.positions < sequence:
        raise ValueError(f"sequence={sequence}: this model has learned positions for only "
                         f"{shape.positions} tokens")
    return Sizes(shape, batch, sequence, recipe_of(recipe).compute, attention, device,
                 selective=checkpointing == "selective", checkpointed=checkpointing == "full")


def _copies(backend, device) -> bool:
    chosen = backend or {"cpu": "gloo", "cuda": "nccl"}[device]
    if chosen not in ("gloo", "nccl"):
        raise ValueError(f"no backend {backend!r}: choose gloo or nccl")
    return chosen == "gloo"


def _strategy(tape, z, recipe, strategy, ranks, rank, **options):
    known = memory_strategies.STRATEGIES
    if strategy not in known:
        raise ValueError(f"no strategy {strategy!r}: choose {', '.join(known)}")
    if recipe_of(recipe).mixed and known[strategy] is not memory_strategies.FSDP:
        raise ValueError(f"recipe {recipe!r} gathers in bf16 what is kept in fp32: "
                         f"FSDP does that, {strategy!r} does not")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} does not exist: ranks count from 0")
    chosen = type(strategy, (known[strategy],), {**options, "flat": strategy == "fsdp1"})
    return chosen(tape, z.shape, recipe_of(recipe), ranks, rank)


def _family(z):
    return memory_gpt2 if z.shape.family == "gpt2" else memory_llama


def _blocks(z):
    return [f"block {i}" for i in range(z.shape.layers)]


def _forward(tape, z, strategy, checkpointed):
    strategy.before_forward("root")
    _embed(tape, z)
    for unit in _blocks(z):
        strategy.before_forward(unit)
        (_checkpointed_forward if checkpointed else _family(z).forward)(tape, unit, z)
        if z.cached and not z.fused and not z.selective and z.batch > 1:
            tape.make(**{f"cache of {unit}": 2 * z.k})  # fused attention saves it anyway
        if unit == "block 0" and z.element < 4 and z.shape.family != "gpt2" and not checkpointed:
            tape.make(embeddings=z.x)
        strategy.after_forward(unit)
    _final_norm(tape, z)
    _head(tape, z, checkpointed)
    strategy.after_forward("root")


def _embed(tape, z):
    """Token embeddings become the residual stream; the model's forward holds on to them."""
    tape.make(x=z.x)
    if z.shape.family == "gpt2":
        tape.make(embeddings=z.x + z.x // z.batch)
        tape.keep("model", places=z.sequence * 8)
        if z.shape.dropout[0]:
            tape.temporary(z.drawn(z.x))
            tape.keep("model", dropped=z.dropped(z.x))
    else:
        tape.make(places=z.sequence * 8)
        tape.keep("model", cosine=z.rotary, sine=z.rotary)
    if z.attention == "eager":
        tape.make(mask=z.mask)


def _checkpointed_forward(tape, unit, z):
    """Only the block's input stays; its inside is made and dropped."""
    tape.rename("x", (unit, "input"))
    tape.keep(unit, generator=RNG_STATE)
    tape.make(x=z.x)


def _final_norm(tape, z):
    _family(z).norm(tape, "model", z, "f")
    if z.shape.family == "gpt2" or z.element == 4:
        tape.rename("x", ("model", "inf"))
    else:
        tape.free("x")


def _head(tape, z, checkpointed):
    """Logits, their fp32 copy, the loss (transformers 5, loss/loss_utils.py: ForCausalLMLoss)."""
    tape.drop("embeddings", *(() if checkpointed else ("mask", "places")))
    tape.make(logits=z.logits)
    if z.element < 4:
        tape.make(logits32=z.logits32)
    tape.make(padded=(z.tokens + z.batch) * 8 if z.batch > 1 else 0)
    tape.keep("model", labels=z.labels, logsoftmax=z.logits32, weight=4)
    tape.make(loss=4)
    tape.drop(*(f"cache of {unit}" for unit in _blocks(z)))
    tape.free("logits", "padded", *(("logits32",) if z.element < 4 else ()))


def _backward(tape, z, strategy, checkpointed):
    strategy.before_backward("root")
    _head_backward(tape, z, strategy)
    for unit in reversed(_blocks(z)):
        strategy.before_backward(unit)
        if checkpointed:
            _recompute(tape, unit, z)
        _family(z).backward(tape, unit, z)
        if checkpointed:
            tape.drop((unit, "generator"), (unit, "input"))
        strategy.after_backward(unit)
    _last(tape)
    _embed_backward(tape, z, strategy)
    tape.free("loss")
    strategy.finish()


def _head_backward(tape, z, strategy):
    tape.make(seed=4)
    tape.make(gnll=z.logits32)
    tape.free("seed")
    tape.release("model", "labels", "weight")
    tape.make(glogits=z.logits32)
    tape.free("gnll")
    tape.release("model", "logsoftmax")
    if z.element < 4:
        tape.make(narrow=z.logits)
        tape.free("glogits")
        tape.rename("narrow", "glogits")
    tape.make(gy=z.x)
    _head_gradient(tape, z, strategy)
    tape.free("glogits")
    tape.release("model", "yf")
    _family(z).norm_backward(tape, "model", z, z.shape.hidden, "f", residual=False)


def _head_gradient(tape, z, strategy):
    """A tied head's gradient waits for the embedding's, to be added to it."""
    size = z.shape.vocabulary * z.shape.hidden
    if z.shape.tied:
        tape.make("gradients", ghead=size * _autograd_bytes(strategy))
    else:
        tape.gradient(size)


def _autograd_bytes(strategy):
    fsdp = isinstance(strategy, memory_strategies.FSDP)
    return strategy.recipe.compute if fsdp else strategy.recipe.gradients


def _recompute(tape, unit, z):
    """Forward once more, inside backward. In bf16 Llama's norm saves a copy of the block's input,
    which itself stays until the block is done."""
    copied = z.element < 4 and z.shape.family != "gpt2"
    if copied:
        tape.make(x=0)
    else:
        tape.rename((unit, "input"), "x")
    tape.make(state=RNG_STATE)
    _family(z).forward(tape, unit, z)
    tape.free("x", "state")


def _embed_backward(tape, z, strategy):
    size = z.shape.vocabulary * z.shape.hidden
    if z.shape.dropout[0]:
        tape.make(undropped=z.x)
        tape.free("gx")
        tape.rename("undropped", "gx")
        tape.release("model", "dropped")
    if z.shape.positions:
        tape.make(gplaces=z.x // z.batch)
        tape.gradient(z.shape.positions * z.shape.hidden)
        tape.free("gplaces")
        tape.release("model", "places")
    if z.shape.tied:
        tape.make("gradients", gwords=size * _autograd_bytes(strategy))
        tape.free("gx")
        tape.gradient(size)
        tape.free("ghead", "gwords")
    else:
        tape.gradient(size)
        tape.free("gx")


def _last(tape):
    """What the model's forward shared among blocks goes with the last of them."""
    tape.drop(("model", "cosine"), ("model", "sine"), "mask", "places")


def _steps(strategy, z) -> float:
    """AdamW counts steps in one fp32 tensor per parameter, which lies on the CPU."""
    counted = strategy.recipe.optimizer == "AdamW" and z.device == "cpu"
    return 4 * len(strategy.tensors) if counted else 0


def _step_temporaries(strategy, z) -> float:
    """AdamW's square root of the second moment: of all parameters at once on CUDA; one after the
    other on the CPU, with a quotient as large, while the last parameter's quotient is still held
    (torch/optim/adam.py, _multi_tensor_adam and _single_tensor_adam)."""
    if strategy.recipe.optimizer != "AdamW":
        return 0
    each = strategy.recipe.optimizer_state / (3 if strategy.recipe.optimizer_state == 12 else 2)
    if z.device == "cuda":
        return sum(strategy.owned) * each
    last = [0, *strategy.owned]
    return max(old + 2 * new for old, new in zip(last, strategy.owned, strict=False)) * each


__all__ = ["CHECKPOINTING", "PHASES", "predict"]
