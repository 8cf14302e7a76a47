"""The core of attention, from queries, keys and values to the output: what it saves for backward
and what it needs for a moment, eager and fused.

Sources: transformers 5, integrations/sdpa_attention.py, and eager_attention_forward in
models/llama/modeling_llama.py and models/gpt2/modeling_gpt2.py. Fused attention saves its inputs,
its output and one number per query: Dao et al., "FlashAttention", 2022, section 3.1.

Forward begins with "q0", "k0", "v0" on the tape (GPT-2: one tensor "qkv" that the unit saves) and
ends with the output "out" saved. Backward begins with its gradient "go" and ends with "gq", "gk",
"gv".
"""


INSIDE = ("q2", "k2", "v2", "scale", "p32", "p", "dropmask", "dropped")


def forward(tape, unit, z):
    """Queries, keys and values become the output, which the unit saves."""
    if z.fused:
        return tape.keep(unit, out=z.q, lse=z.lse)
    _copies(tape, unit, z)
    _probabilities(tape, unit, z)
    tape.make(flat=z.q * z.scores_element // z.element)
    tape.keep(unit, out=z.q)
    tape.free("flat")


def forget(tape, unit, z):
    """Selective checkpointing: forward's inside is dropped; only inputs and output stay."""
    tape.drop(*((unit, name) for name in INSIDE))


def again(tape, unit, z):
    """Selective checkpointing: the inside is computed once more for backward."""
    _copies(tape, unit, z)
    _probabilities(tape, unit, z)
    tape.temporary(z.q)


def _copies(tape, unit, z):
    """matmul wants each head's rows side by side: one copy each; math-mode SDPA casts to fp32."""
    queries, keys, values = z.factors
    tape.keep(unit, q2=queries, k2=keys, v2=values)


def _probabilities(tape, unit, z):
    """Scores, scaled and masked, through softmax and dropout."""
    tape.make(a=z.scores)
    tape.make(b=z.scores)
    tape.keep(unit, scale=z.constants(1) if z.attention == "eager" else 0)
    tape.free("a")
    tape.make(a=z.scores)
    tape.free("b")
    if z.softmax_upcast:
        tape.make(a32=z.scores32)
        tape.keep(unit, p32=z.scores32)
        tape.free("a32")
    tape.keep(unit, p=z.scores)
    tape.free("a")
    if z.attention_dropout:
        tape.keep(unit, dropmask=z.dropped_scores)
        tape.temporary(z.drawn_scores)
        tape.keep(unit, dropped=z.scores)
        if z.softmax_upcast:
            tape.release(unit, "p")


def backward(tape, unit, z):
    """The gradient of the output becomes those of queries, keys and values."""
    if z.fused:
        return _fused_backward(tape, unit, z)
    tape.make(go2=z.q)
    tape.free("go")
    tape.release(unit, "out")
    tape.make(gp=z.scores, gv=z.q)
    tape.free("go2")
    tape.release(unit, "v2", *_multiplied(z))
    _softmax_backward(tape, unit, z)
    tape.make(gq=z.q, gk=z.q)
    tape.free("gs")
    tape.release(unit, "q2", "k2")
    _shared_heads(tape, z)


def _multiplied(z):
    """What the values were multiplied by, unless it is the softmax's own output."""
    if z.attention_dropout:
        return ("dropped",)
    return ("p",) if z.softmax_upcast else ()


def _fused_backward(tape, unit, z):
    tape.make(gq=z.q, gk=z.k, gv=z.k)
    tape.free("go")
    tape.release(unit, "out", "lse")


def _softmax_backward(tape, unit, z):
    """gp -> gs: back through dropout, softmax, mask and scaling."""
    if z.attention_dropout:
        tape.make(undropped=z.scores)
        tape.free("gp")
        tape.rename("undropped", "gp")
        tape.release(unit, "dropmask")
    size = z.scores
    if z.softmax_upcast:
        size = z.scores32
        tape.make(gp32=size)
        tape.free("gp")
    name = "gp32" if z.softmax_upcast else "gp"
    tape.make(gs0=size)
    tape.free(name)
    tape.release(unit, "p32" if z.softmax_upcast else "p")
    if z.softmax_upcast:
        tape.make(gs1=z.scores)
        tape.free("gs0")
    tape.make(gs=z.scores)
    tape.release(unit, "scale")
    tape.free("gs1" if z.softmax_upcast else "gs0")


def _shared_heads(tape, z):
    """Gradients of repeated key heads are summed over the queries that share them."""
    if z.k == z.q:
        return
    for name in ("gk", "gv"):
        tape.make(summed=z.k)
        tape.free(name)
        tape.make(**{name: z.k})
        tape.free("summed")
