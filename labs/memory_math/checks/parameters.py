"""Exercise 1.1: the parameters of a block and of a model."""

from labs.exercises.verdicts import check
from labs.memory_math import formula_feedback as feedback
from labs.memory_math.checks import TABLE_HINT
from labs.memory_math.formula_feedback import Cause
from labs.memory_math.ground_truth import counted_model, random_models
from labs.memory_math.scaffold import MODELS


@check("1.1", hints=TABLE_HINT)
def check_parameters(block_parameters, model_parameters):
    """Both formulas must count exactly what models on the meta device have."""
    feedback.require_signature(block_parameters, ("m",))
    feedback.require_signature(model_parameters, ("m",))
    # Sizes drawn anew at each call reject a table of the known models.
    models = [*map(counted_model, MODELS), *random_models()]
    # All blocks come first: a mistake in the block would show in every model's total.
    for name, m, block, _ in models:
        what = f"{name}, one block"
        feedback.require_value(block_parameters(m), block, what, "parameters", _block_causes(m),
                               f"Compare with lab.show_block, matrix by matrix: {_sizes(m)}.")
    for name, m, block, total in models:
        feedback.require_value(model_parameters(m), total, name, "parameters",
                               _model_causes(m, block),
                               "Embedding, positions, blocks, final norm, head.")
    return f"exactly the parameters of {len(MODELS)} known models and of 3 of random sizes"


def _sizes(m) -> str:
    biases = " ".join(name for name in ("qkv_bias", "out_bias", "mlp_bias") if getattr(m, name))
    return (f"hidden {m.hidden}, {m.heads} heads and {m.kv_heads} key heads of {m.head_dim}, "
            f"ffn {m.ffn}, {biases or 'no biases'}")


def _block_causes(m) -> list[Cause]:
    return [*_attention_causes(m), *_bias_causes(m), *_norm_causes(m),
            *_feed_forward_causes(m)]


def _attention_causes(m) -> list[Cause]:
    h, q, k = m.hidden, m.query, m.key
    return [
        Cause(2 * (h + m.qkv_bias) * (q - k), "keys and values are counted as wide as queries",
              f"There are {m.kv_heads} key and value heads for {m.heads} query heads: "
              "grouped-query attention."),
        Cause(-(h + m.qkv_bias) * k, "keys or values are missing", "Both have m.kv_heads heads."),
        Cause(2 * h * (h - q) + 2 * (h + m.qkv_bias) * (h * k // q - k)
              + m.qkv_bias * (h - q), "head_dim is taken as hidden / heads",
              f"Queries are m.heads * m.head_dim = {q} wide."),
        Cause(-q * h, "attention's output matrix is missing",
              "It leads from all heads back to h.")]


def _bias_causes(m) -> list[Cause]:
    h, f, q, k = m.hidden, m.ffn, m.query, m.key
    gpt2 = m.family == "gpt2"
    qkv, mlp = (q + 2 * k) * m.qkv_bias, ((1 if gpt2 else 2) * f + h) * m.mlp_bias
    return [
        Cause(-qkv - m.out_bias * h - mlp, "all biases are missing",
              "m.qkv_bias, m.out_bias and m.mlp_bias say which matrices have one."),
        Cause(-qkv, "the biases of queries, keys and values are missing", "m.qkv_bias is True."),
        Cause(-m.out_bias * h, "the bias of attention's output matrix is missing",
              "m.out_bias is True."),
        Cause(-mlp, "the feed-forward part's biases are missing",
              "A bias is as wide as its matrix's output."),
        Cause(0 if gpt2 else -f * m.mlp_bias, "one bias of the feed-forward part is missing",
              "SwiGLU has three matrices, gate, up and down: with m.mlp_bias each has a bias."),
        Cause(q + 2 * k - qkv, "queries, keys and values have no bias here",
              "Only where m.qkv_bias is True do they have one."),
        Cause(h - h * m.out_bias, "attention's output has no bias here",
              "Only where m.out_bias is True does it have one.")]


def _norm_causes(m) -> list[Cause]:
    gpt2 = m.family == "gpt2"
    norms = (4 if gpt2 else 2) * m.hidden
    return [
        Cause(-norms, "the two norms are missing", f"They have {norms} parameters."),
        Cause(-norms // 2, "half of the norms' parameters are missing",
              "A block has two norms; GPT-2's have a weight and a bias, Llama's only a weight."),
        Cause(norms if not gpt2 else 0, "the norms have no bias here",
              "RMSNorm, in Llama and Qwen2, has a weight and nothing else.")]


def _feed_forward_causes(m) -> list[Cause]:
    h, f, gpt2 = m.hidden, m.ffn, m.family == "gpt2"
    matrices = (2 if gpt2 else 3) * h * f
    return [
        Cause(-h * f if not gpt2 else 0, "one matrix of the feed-forward part is missing",
              "SwiGLU has three: gate, up and down."),
        Cause(h * f if gpt2 else 0, "there is one matrix too many in the feed-forward part",
              "GPT-2 has two: up and down. Llama and Qwen2 have three."),
        Cause(matrices * 4 * h // f - matrices, "the feed-forward part is taken as 4 times as "
              "wide as the model", f"It is m.ffn = {m.ffn} wide.")]


def _model_causes(m, block) -> list[Cause]:
    embedding, norm = m.vocabulary * m.hidden, (2 if m.family == "gpt2" else 1) * m.hidden
    return [
        Cause(embedding if m.tied else 0, "the head is counted, though it is tied to the "
              "embedding", "With m.tied the two are one matrix, held once."),
        Cause(-embedding, "an embedding or head of vocabulary x hidden is missing",
              "Without m.tied the head is a matrix of its own."),
        Cause(-m.positions * m.hidden, "the learned positions are missing",
              "GPT-2 has a second embedding, m.positions x hidden; for others m.positions is 0."),
        Cause(-norm, "the final norm is missing", "One more norm stands after the last block."),
        Cause(-m.hidden if m.family == "gpt2" else 0, "the final norm's bias is missing",
              "GPT-2's norms have a weight and a bias."),
        Cause(-(m.layers - 1) * block, "only one block is counted",
              "There are m.layers of them."),
        Cause(block, "one block too many is counted", "There are m.layers of them.")]
