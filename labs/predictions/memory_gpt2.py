"""A GPT-2 block, tensor by tensor, forward and backward, as transformers 5 runs it
(models/gpt2/modeling_gpt2.py; activations.py for the activation functions)."""

from labs.predictions import memory_attention


def forward(tape, unit, z):
    """From the residual stream "x" to the next one. x is on the tape before and after."""
    norm(tape, unit, z, "1")
    _attention(tape, unit, z)
    _dropout(tape, unit, z, "o", "drop1")
    tape.make(x1=z.x)
    tape.free("o")
    tape.rename("x", (unit, "in1"))
    norm(tape, unit, z, "2")
    _activation(tape, unit, z)
    tape.make(o=z.x)
    _dropout(tape, unit, z, "o", "drop2")
    tape.make(x2=z.x)
    tape.free("o")
    tape.rename("x1", (unit, "in2"))
    tape.rename("x2", "x")


def norm(tape, unit, z, which):
    """LayerNorm saves its input, two statistics and, as the next layer's input, its output."""
    tape.keep(unit, **{f"y{which}": z.x, f"mean{which}": z.layernorm_stat,
                       f"rstd{which}": z.layernorm_stat})


def _dropout(tape, unit, z, name, saved):
    """The mask is saved; the result takes the input's place."""
    if not z.shape.dropout[2]:
        return
    tape.keep(unit, **{saved: z.dropped(z.x)})
    tape.temporary(z.drawn(z.x))
    tape.make(result=z.x)
    tape.free(name)
    tape.rename("result", name)


def _attention(tape, unit, z):
    tape.keep(unit, qkv=3 * z.x)
    if z.cached and (z.fused or z.selective):
        tape.keep(unit, cache=2 * z.k)
    memory_attention.forward(tape, unit, z)
    if z.selective and not z.fused:
        memory_attention.forget(tape, unit, z)
    elif not z.fused:
        tape.release(unit, "qkv")
    tape.make(o=z.x)


def _activation(tape, unit, z):
    tape.keep(unit, fc=z.f)
    if z.shape.activation == "gelu_new":
        tape.keep(unit, half=z.f)
        tape.make(cube=z.f, scaled=z.f)
        tape.free("cube", "scaled")
        tape.keep(unit, tanh=z.f, one=z.f, constants=z.constants(3))
    tape.keep(unit, product=z.f)
    if z.shape.activation == "relu":
        tape.release(unit, "fc")


def backward(tape, unit, z):
    """"gx", the gradient of the residual stream, becomes that of the block's input."""
    sizes = z.block_sizes
    _mlp_backward(tape, unit, z, sizes)
    norm_backward(tape, unit, z, sizes["ln_2.weight"], "2")
    _attention_backward(tape, unit, z, sizes)
    norm_backward(tape, unit, z, sizes["ln_1.weight"], "1")


def _conv1d_backward(tape, sizes, name, made, size):
    """Gradients of the layer's input, weight and bias, made in one go."""
    tape.make(**{made: size})
    tape.gradient(sizes[f"{name}.weight"] + sizes[f"{name}.bias"])


def _through_dropout(tape, unit, z, saved):
    """The gradient behind a dropout: a tensor of its own, "gd"; without dropout gx serves."""
    if z.shape.dropout[2]:
        tape.make(gd=z.x)
        tape.release(unit, saved)


def _behind_dropout(tape, z):
    if z.shape.dropout[2]:
        tape.free("gd")


def _mlp_backward(tape, unit, z, sizes):
    _through_dropout(tape, unit, z, "drop2")
    _conv1d_backward(tape, sizes, "mlp.c_proj", "gp", z.f)
    _behind_dropout(tape, z)
    tape.release(unit, "product")
    (_gelu_new_backward if z.shape.activation == "gelu_new" else _simple_backward)(tape, unit, z)
    _conv1d_backward(tape, sizes, "mlp.c_fc", "gy", z.x)
    tape.free("gf")
    tape.release(unit, "y2")


def _simple_backward(tape, unit, z):
    tape.make(gf=z.f)
    tape.free("gp")
    if z.shape.activation != "relu":
        tape.release(unit, "fc")


def _gelu_new_backward(tape, unit, z):
    """0.5·f·(1 + tanh(c·(f + 0.044715·f³))), last step first."""
    tape.make(ghalf=z.f, gone=z.f)
    tape.free("gp")
    tape.release(unit, "half", "one")
    tape.make(gt=z.f)
    tape.free("gone")
    tape.release(unit, "tanh")
    tape.make(gf=z.f)
    tape.free("gt")
    tape.make(gcube=z.f)
    tape.make(square=z.f, three=z.f, product=z.f)
    tape.free("square", "three", "gcube", "product")
    tape.release(unit, "fc")
    tape.make(rest=z.f)
    tape.free("ghalf", "rest")
    tape.release(unit, "constants")


def norm_backward(tape, unit, z, weight, which, residual=True):
    """"gy" becomes the input's gradient, and is added to "gx" (or becomes it)."""
    tape.make(ga=z.x)
    tape.gradient(weight)
    tape.gradient(weight)
    tape.free("gy")
    tape.release(unit, f"in{which}", f"mean{which}", f"rstd{which}")
    if residual:
        tape.free("ga")
    else:
        tape.rename("ga", "gx")


def _attention_backward(tape, unit, z, sizes):
    _through_dropout(tape, unit, z, "drop1")
    _conv1d_backward(tape, sizes, "attn.c_proj", "go", z.x)
    _behind_dropout(tape, z)
    if z.selective and not z.fused:
        memory_attention.again(tape, unit, z)
    memory_attention.backward(tape, unit, z)
    if z.fused or z.selective:
        tape.release(unit, "qkv")
        tape.drop((unit, "cache"))
    tape.make(gqkv=3 * z.x)
    tape.free("gq", "gk", "gv")
    _conv1d_backward(tape, sizes, "attn.c_attn", "gy", z.x)
    tape.free("gqkv")
    tape.release(unit, "y1")
