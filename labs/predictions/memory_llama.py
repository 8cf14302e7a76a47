"""A Llama or Qwen2 block, tensor by tensor, forward and backward, as transformers 5 runs it
(models/llama/modeling_llama.py, models/qwen2/modeling_qwen2.py)."""

from labs.predictions import memory_attention


def forward(tape, unit, z):
    """From the residual stream "x" to the next one. x is on the tape before and after."""
    norm(tape, unit, z, "1")
    _attention(tape, unit, z)
    tape.make(x1=z.x)
    tape.free("o")
    norm(tape, unit, z, "2", "x1")
    tape.keep(unit, gate=z.f, act=z.f, up=z.f, product=z.f)
    tape.make(down=z.x)
    tape.make(x2=z.x)
    tape.free("down")
    _saved_by_norm(tape, unit, z, "2", "x1")
    _saved_by_norm(tape, unit, z, "1", "x")
    tape.rename("x2", "x")


def norm(tape, unit, z, which, x="x"):
    """RMSNorm: it saves its input in fp32, a statistic, the normalised tensor and its output."""
    if z.element < 4:
        tape.keep(unit, **{f"in{which}": z.x32})
    tape.make(square=z.x32)
    tape.make(variance=z.stat)
    tape.free("square")
    tape.keep(unit, **{f"r{which}": z.stat})
    if z.element < 4:
        tape.make(wide=z.x32)
    tape.keep(unit, **{f"hat{which}": z.x, f"y{which}": z.x})
    tape.free("variance", *(("wide",) if z.element < 4 else ()))


def _saved_by_norm(tape, unit, z, which, x):
    """In fp32 the norm's input itself is saved; in bf16 only its copy is, and x goes."""
    if z.element < 4:
        tape.free(x)
    else:
        tape.rename(x, (unit, f"in{which}"))


def _attention(tape, unit, z):
    tape.make(q0=z.q, k0=z.k)
    tape.make(v0=z.k)
    _rotate(tape, "q", z.q)
    _rotate(tape, "k", z.k)
    tape.free("q0", "k0")
    if z.fused or z.selective:
        for name in ("q", "k", "v0"):
            tape.rename(name, (unit, name))
        memory_attention.forward(tape, unit, z)
    else:
        memory_attention.forward(tape, unit, z)
        tape.free("q", "k", "v0")
    if z.selective and not z.fused:
        memory_attention.forget(tape, unit, z)
    tape.make(o=z.x)


def _rotate(tape, name, size):
    """x·cos + rotate_half(x)·sin."""
    tape.make(cosine=size, turned=size)
    tape.make(sine=size)
    tape.free("turned")
    tape.make(**{name: size})
    tape.free("cosine", "sine")


def backward(tape, unit, z):
    """"gx", the gradient of the residual stream, becomes that of the block's input."""
    sizes = z.block_sizes
    _mlp_backward(tape, unit, z, sizes)
    norm_backward(tape, unit, z, sizes["post_attention_layernorm.weight"], "2")
    _attention_backward(tape, unit, z, sizes)
    norm_backward(tape, unit, z, sizes["input_layernorm.weight"], "1")


def _linear_backward(tape, z, sizes, name, made, size):
    """Gradients of a linear layer's weight and input, made in one go."""
    tape.make(**{made: size})
    tape.gradient(sum(sizes.get(f"{name}.{part}", 0) for part in ("weight", "bias")))


def _mlp_backward(tape, unit, z, sizes):
    _linear_backward(tape, z, sizes, "mlp.down_proj", "gm", z.f)
    tape.release(unit, "product")
    tape.make(ga=z.f, gu=z.f)
    tape.free("gm")
    tape.release(unit, "act", "up")
    _linear_backward(tape, z, sizes, "mlp.up_proj", "gy", z.x)
    tape.free("gu")
    tape.make(gg=z.f)
    tape.free("ga")
    tape.release(unit, "gate")
    _linear_backward(tape, z, sizes, "mlp.gate_proj", "gy2", z.x)
    tape.free("gg")
    tape.release(unit, "y2")
    _sum(tape, z.x, "gy", "gy2")


def _sum(tape, size, first, second):
    """first + second in a new tensor: autograd adds in place only what nobody else looks at."""
    tape.make(sum=size)
    tape.free(first, second)
    tape.rename("sum", first)


def norm_backward(tape, unit, z, weight, which, residual=True):
    """"gy" becomes the input's gradient, and is added to "gx" (or becomes it)."""
    tape.make(gweight=z.x, gh=z.x)
    tape.free("gy")
    tape.gradient(weight)
    tape.free("gweight")
    tape.release(unit, f"hat{which}")
    if z.element < 4:
        tape.make(gh32=z.x32)
        tape.free("gh")
        tape.rename("gh32", "gh")
    tape.make(ga=z.x32, gr=z.x32)
    tape.free("gh", "gr")
    tape.make(gmean=z.x32)
    tape.make(p=z.x32, p2=z.x32, gp=z.x32)
    tape.free("p", "p2", "gmean", "gp")
    tape.release(unit, f"in{which}", f"r{which}")
    if z.element < 4:
        tape.make(narrow=z.x)
        tape.free("ga")
        tape.rename("narrow", "ga")
    if residual:
        tape.free("ga")
    else:
        tape.rename("ga", "gx")


def _attention_backward(tape, unit, z, sizes):
    _linear_backward(tape, z, sizes, "self_attn.o_proj", "go", z.q)
    if z.selective and not z.fused:
        memory_attention.again(tape, unit, z)
    memory_attention.backward(tape, unit, z)
    if z.fused or z.selective:
        tape.release(unit, "q", "k", "v0")
    _rotate_backward(tape, "gk", z.k)
    _rotate_backward(tape, "gq", z.q)
    for name, gradient, size in (("v", "gv", z.k), ("k", "gk", z.k), ("q", "gq", z.q)):
        _project_backward(tape, z, sizes, name, gradient, size)
    tape.release(unit, "y1")


def _rotate_backward(tape, name, size):
    tape.make(t=size)
    tape.make(n=size / 2)
    tape.make(second=size)
    tape.free("n")
    tape.make(first=size)
    tape.free("t", "first")
    tape.make(cosine=size)
    tape.free("cosine", name)
    tape.rename("second", name)


def _project_backward(tape, z, sizes, name, gradient, size):
    """Queries come first in forward, so their gradients last; each adds to "gy"."""
    if name != "v":
        tape.temporary(size)
    made = "gy" if name == "v" else "gy2"
    _linear_backward(tape, z, sizes, f"self_attn.{name}_proj", made, z.x)
    tape.free(gradient)
    if name == "k":
        _sum(tape, z.x, "gy", "gy2")
    elif name == "q":
        tape.free("gy2")
