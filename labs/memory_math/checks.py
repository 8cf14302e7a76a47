"""Checks of exercises 1.1 to 1.3: parameters, bytes by recipe, bytes per rank under ZeRO."""

import random

import torch

from labs.exercises.verdicts import Wrong, check
from labs.memory_math import truth
from labs.memory_math.answers import Slip, close, compare, instead, number, numbers, takes
from labs.training.memory_categories import GB

KNOWN = ("GPT-2", "Llama-2-7B", "Llama-2-13B", "Llama-3-8B", "Llama-3-70B", "Qwen2-0.5B",
         "Qwen2-7B")
STATES = ("parameters", "gradients", "optimizer state")
BY_TABLE = {"KeyError": "A table holds only the models it was made for: compute from m's sizes."}


@check("1.1", hints=BY_TABLE)
def check_parameters(block_parameters, model_parameters):
    """Both must count what the model on the meta device has, exactly, also for drawn sizes."""
    takes(block_parameters, ("m",))
    takes(model_parameters, ("m",))
    models = [(name, *truth.known_model(name)) for name in KNOWN] + truth.drawn_models()
    for name, m, block, _ in models:
        what = f"{name}, one block"
        compare(number(block_parameters(m), what), block, what, "parameters", _block_slips(m),
                f"Compare with lab.show_block, matrix by matrix: {_sizes(m)}.")
    for name, m, block, whole in models:
        compare(number(model_parameters(m), name), whole, name, "parameters",
                _model_slips(m, block), "Embedding, positions, blocks, final norm, head.")
    return (f"exactly the parameters of {len(KNOWN)} models that you know and of 3 that were "
            "drawn at random")


def _sizes(m) -> str:
    biases = " ".join(name for name in ("qkv_bias", "out_bias", "mlp_bias") if getattr(m, name))
    return (f"hidden {m.hidden}, {m.heads} heads and {m.kv_heads} key heads of {m.head_dim}, "
            f"ffn {m.ffn}, {biases or 'no biases'}")


def _block_slips(m) -> list:
    h, f, q, k = m.hidden, m.ffn, m.query, m.key
    gpt2 = m.family == "gpt2"
    qkv, inside = (q + 2 * k) * m.qkv_bias, (2 if gpt2 else 3) * h * f
    mlp = ((1 if gpt2 else 2) * f + h) * m.mlp_bias
    norms = (4 if gpt2 else 2) * h
    return [
        Slip(2 * (h + m.qkv_bias) * (q - k), "keys and values are counted as wide as queries",
             f"There are {m.kv_heads} key and value heads for {m.heads} query heads: grouped-query "
             "attention."),
        Slip(-(h + m.qkv_bias) * k, "keys or values are missing", "Both have m.kv_heads heads."),
        Slip(-qkv - m.out_bias * h - mlp, "all biases are missing",
             "m.qkv_bias, m.out_bias and m.mlp_bias say which matrices have one."),
        Slip(-qkv, "the biases of queries, keys and values are missing", "m.qkv_bias is True."),
        Slip(-m.out_bias * h, "the bias of attention's output matrix is missing",
             "m.out_bias is True."),
        Slip(-mlp, "the feed-forward part's biases are missing",
             "A bias is as wide as its matrix's output."),
        Slip(0 if gpt2 else -f * m.mlp_bias, "one bias of the feed-forward part is missing",
             "SwiGLU has three matrices, gate, up and down: with m.mlp_bias each has a bias."),
        Slip(q + 2 * k - qkv, "queries, keys and values have no bias here", "Ask m.qkv_bias."),
        Slip(h - h * m.out_bias, "attention's output has no bias here", "Ask m.out_bias."),
        Slip(-norms, "the two norms are missing", f"They have {norms} parameters."),
        Slip(-norms // 2, "half of the norms' parameters are missing",
             "A block has two norms; GPT-2's have a weight and a bias, Llama's only a weight."),
        Slip(norms if not gpt2 else 0, "the norms have no bias here",
             "RMSNorm, in Llama and Qwen2, has a weight and nothing else."),
        Slip(-h * f if not gpt2 else 0, "one matrix of the feed-forward part is missing",
             "SwiGLU has three: gate, up and down."),
        Slip(h * f if gpt2 else 0, "there is one matrix too many in the feed-forward part",
             "GPT-2 has two: up and down. Llama and Qwen2 have three."),
        Slip(inside * 4 * h // f - inside, "the feed-forward part is taken as 4 times as wide as "
             "the model", f"It is m.ffn = {m.ffn} wide."),
        Slip(2 * h * (h - q) + 2 * (h + m.qkv_bias) * (h * k // q - k)
             + m.qkv_bias * (h - q), "head_dim is taken as hidden / heads",
             f"Queries are m.heads * m.head_dim = {q} wide."),
        Slip(-q * h, "attention's output matrix is missing", "It leads from all heads back to h."),
    ]


def _model_slips(m, block) -> list:
    words, norm = m.vocabulary * m.hidden, (2 if m.family == "gpt2" else 1) * m.hidden
    return [
        Slip(words if m.tied else 0, "the head is counted, though it is tied to the embedding",
             "With m.tied the two are one matrix, held once."),
        Slip(-words, "an embedding or head of vocabulary x hidden is missing",
             "Without m.tied the head is a matrix of its own."),
        Slip(-m.positions * m.hidden, "the learned positions are missing",
             "GPT-2 has a second embedding, m.positions x hidden; for others m.positions is 0."),
        Slip(-norm, "the final norm is missing", "One more norm stands after the last block."),
        Slip(-m.hidden if m.family == "gpt2" else 0, "the final norm's bias is missing",
             "GPT-2's norms have a weight and a bias."),
        Slip(-(m.layers - 1) * block, "only one block is counted", "There are m.layers of them."),
        Slip(block, "one block too many is counted", "There are m.layers of them."),
    ]


@check("1.2", hints=BY_TABLE)
def check_bytes_per_parameter(bytes_per_parameter):
    """Three numbers for any types: of weights, gradients and moments, with a master copy or not."""
    takes(bytes_per_parameter, ("weights", "gradients", "moments", "master"))
    for types in _drawn_types():
        what = "weights {}, gradients {}, moments {}, {} master".format(
            *(str(kind).removeprefix("torch.") for kind in types[:3]),
            "with a" if types[3] else "no")
        said = numbers(bytes_per_parameter(*types), STATES, what)
        for name, got, want, slips in zip(STATES, said, _bytes(*types), _type_slips(*types),
                                          strict=True):
            compare(got, want, f"{what}: {name}", "bytes", slips)
    return "right for fp32 and bf16, and for the 8-bit and 64-bit types that nobody told you of"


def _drawn_types() -> list:
    dice = random.Random()
    others = [torch.float64, torch.float8_e4m3fn, torch.float16, torch.uint8]
    fp32, bf16 = torch.float32, torch.bfloat16
    return [(fp32, fp32, fp32, False), (bf16, bf16, bf16, False), (bf16, bf16, fp32, False),
            (bf16, bf16, fp32, True), (bf16, fp32, fp32, True),
            *((*dice.sample(others, 3), master) for master in (False, True))]


def _bytes(weights, gradients, moments, master) -> tuple:
    """Of real tensors: one parameter's weight, gradient, two moments and master copy."""
    state = [torch.empty(1, dtype=moments)] * 2 + [torch.empty(1)] * master
    return (torch.empty(1, dtype=weights).nbytes, torch.empty(1, dtype=gradients).nbytes,
            sum(tensor.nbytes for tensor in state))


def _type_slips(weights, gradients, moments, master) -> tuple:
    each = moments.itemsize
    return ([Slip(4 * master, "the master copy is counted among the weights",
                  "The optimizer keeps it: it belongs to the optimizer state.")],
            [instead(weights.itemsize, gradients.itemsize, "that is the weights' type",
                     "Gradients have a type of their own here.")],
            [Slip(-4 * master, "the fp32 master copy is missing", "It takes 4 more bytes."),
             Slip(8 - 2 * each, "the moments are taken as fp32",
                  f"They are {each} bytes each here."),
             Slip(2 * weights.itemsize - 2 * each, "the moments are taken in the weights' type",
                  "They have a type of their own."),
             Slip(-each, "only one moment is counted", "Adam keeps two: mean and mean square."),
             Slip(4 * (not master), "there is no master copy here", "Ask `master`."),
             Slip((weights.itemsize - 4) * master, "the master copy is taken in the weights' type",
                  "It is there to be finer than they are: in fp32."),
             Slip((each - 4) * master, "the master copy is taken in the moments' type",
                  "A master copy is fp32, whatever the moments are.")])


@check("1.3", hints=BY_TABLE)
def check_per_rank(per_rank):
    """Three numbers for every stage: the paper's figure 1, 70B on 8 ranks, and drawn sizes."""
    takes(per_rank, ("count", "recipe", "stage", "ranks"))
    for name, count, recipe, ranks in _drawn_jobs():
        for stage in (0, 1, 2, 3):
            what = f"{name}, stage {stage}"
            said = numbers(per_rank(count, recipe, stage, ranks), STATES, what)
            _compare_stage(said, count, recipe, stage, ranks, what)
    return "stages 0 to 3 for the paper's figure 1, for 70B on 8 ranks and for drawn sizes"


def _drawn_jobs() -> list:
    dice = random.Random()
    recipe, ranks = tuple(dice.sample(range(1, 20), 3)), dice.randint(20, 99)
    count = ranks * dice.randint(10**4, 10**7) + 1  # so that nothing divides
    return [("70B on 8 ranks", 70e9, (2, 2, 8), 8), ("7.5B on 64 ranks", 7.5e9, (2, 2, 12), 64),
            ("a job drawn at random", count, recipe, ranks)]


def _compare_stage(said, count, recipe, stage, ranks, what):
    want = tuple(count * size / (ranks if stage >= least else 1)
                 for size, least in zip(recipe, (3, 2, 1), strict=True))
    for name, got, right, size in zip(STATES, said, want, recipe, strict=True):
        if not close(got, right):
            together = f"{_gb(sum(said))} GB in all, where a rank holds {_gb(sum(want))}"
            raise _not_the_share(f"{what}: {name}", got, right, count * size, ranks, together)


def _not_the_share(what, got, right, whole, ranks, together) -> Wrong:
    words = f"{what}: {_gb(got)} GB per rank, it is {_gb(right)}"
    rule = "Stage 1 divides the optimizer state alone, 2 the gradients too, 3 the parameters too."
    if close(got, 0):
        return Wrong(f"{what} are missing: {together}",
                     "A rank keeps its share of what is divided: 1/N of it, not nothing.")
    if abs(got - right) < 1:
        return Wrong(f"{what}: off by less than a byte", "Divide with /: // drops the rest.")
    if close(got, whole):
        return Wrong(f"{words}: not divided", rule)
    if close(got, whole / ranks):
        return Wrong(f"{words}: divided, though this stage keeps it whole", rule)
    return Wrong(f"{words}, {got / right:.4g}x", "count times bytes; divided by N, or not.")


def _gb(value) -> str:
    return f"{value / GB:,.6g}"
