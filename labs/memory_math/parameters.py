"""Exercise 1.1: the parameters of a block and of a model."""

from dataclasses import replace

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, pairs, require_signature
from labs.checks.verdicts import check, print_in_script, shows
from labs.memory_math import ground_truth
from labs.memory_math.ground_truth import counted_model, random_models
from labs.memory_math.scaffold import MODELS, TABLE_HINT, model_sizes
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.memory.parameters import block_size, count, norm_size, norms_size
from labs.training import hf_configs


@check("1.1", hints=TABLE_HINT)
def check_parameters(block_parameters, model_parameters):
    """Both formulas must count exactly what models on the meta device have."""
    require_signature(block_parameters, ("m",))
    require_signature(model_parameters, ("m",))
    # Random sizes, new ones at each call, reject a table of the known models.
    models = [*map(counted_model, MODELS), *random_models()]
    # All blocks come first: a mistake in the block would show in every model's total.
    for name, m, block, _ in models:
        judge_number(block_parameters(m), block, _block_causes(m, block), f"{name}, one block",
                     "parameters",
                     f"Compare with lab.show_block, matrix by matrix: {_sizes(m)}.")
    for name, m, _, total in models:
        judge_number(model_parameters(m), total, _model_causes(m, total), name, "parameters",
                     "Embedding, positions, blocks, final norm, head.")
    return f"exactly the parameters of {len(MODELS)} known models and of 3 of random sizes"


def _sizes(m) -> str:
    biases = " ".join(name for name in ("qkv_bias", "out_bias", "mlp_bias") if getattr(m, name))
    return (f"hidden {m.hidden}, {m.heads} heads and {m.kv_heads} key heads of {m.head_dim}, "
            f"ffn {m.ffn}, {biases or 'no biases'}")


def _block_causes(m, block) -> list[Cause]:
    """Each is the number of parameters with one size changed, or with one part more or less; where
    a mistake does not apply to this family, it is the right number."""
    def with_sizes(**sizes) -> int:
        return block_size(replace(m, **sizes))

    causes = [*_attention_causes(m, block, with_sizes), *_bias_causes(m, block, with_sizes),
              *_norm_causes(m, block), *_feed_forward_causes(m, block, with_sizes)]
    return causes + pairs(causes, block)


def _attention_causes(m, block, with_sizes) -> list[Cause]:
    return [
        Cause("keys_values_counted_wide_queries", with_sizes(kv_heads=m.heads),
              "keys and values are counted as wide as queries",
              f"There are {m.kv_heads} key and value heads for {m.heads} query heads: "
              "grouped-query attention."),
        # One matrix of (hidden, key), and its bias where there is one.
        Cause("keys_values_missing", block - (m.hidden + m.qkv_bias) * m.key,
              "keys or values are missing", "Both have m.kv_heads heads."),
        Cause("head_dim_taken_hidden_heads", with_sizes(head_dim=m.hidden // m.heads),
              "head_dim is taken as hidden / heads",
              f"Queries are m.heads * m.head_dim = {m.query} wide."),
        Cause("attention_output_matrix_missing", block - m.query * m.hidden,
              "attention's output matrix is missing", "It leads from all heads back to h.")]


def _bias_causes(m, block, with_sizes) -> list[Cause]:
    no_feed_forward_bias = block - (m.mlp_matrices == 3) * m.mlp_bias * m.ffn
    return [
        Cause("all_biases_missing", with_sizes(qkv_bias=False, out_bias=False, mlp_bias=False),
              "all biases are missing",
              "m.qkv_bias, m.out_bias and m.mlp_bias say which matrices have one."),
        Cause("biases_queries", with_sizes(qkv_bias=False),
              "the biases of queries, keys and values are missing", "m.qkv_bias is True."),
        Cause("bias_attention_output_matrix", with_sizes(out_bias=False),
              "the bias of attention's output matrix is missing", "m.out_bias is True."),
        Cause("feed_forward_part_biases_missing", with_sizes(mlp_bias=False),
              "the feed-forward part's biases are missing",
              "A bias is as wide as its matrix's output."),
        Cause("one_bias_feed_forward_part", no_feed_forward_bias,
              "one bias of the feed-forward part is missing",
              "SwiGLU has three matrices, gate, up and down: with m.mlp_bias each has a bias."),
        Cause("queries_keys_values_no_bias", with_sizes(qkv_bias=True),
              "queries, keys and values have no bias here",
              "Only where m.qkv_bias is True do they have one."),
        Cause("attention_output_no_bias", with_sizes(out_bias=True),
              "attention's output has no bias here",
              "Only where m.out_bias is True does it have one.")]


def _norm_causes(m, block) -> list[Cause]:
    norms, has_bias = norms_size(m), m.norm_bias
    # In the known GPT-2 the bias of the matrix that leads up is as large as both norms.
    as_large = m.mlp_bias and m.ffn == norms
    other = ", or the bias of the feed-forward part's first matrix" if as_large else ""
    return [
        Cause("two_norms_missing", block - norms, f"the two norms are missing{other}",
              f"They have {norms} parameters."),
        Cause("bias_feed_forward_part_first", block - (m.mlp_matrices == 2) * m.mlp_bias * m.ffn,
              "the bias of the feed-forward part's first matrix is missing",
              f"It is m.ffn = {m.ffn} long."),
        Cause("half_norms_parameters_missing", block - norms // 2,
              "half of the norms' parameters are missing",
              "A block has two norms; GPT-2's have a weight and a bias, Llama's only a weight."),
        Cause("norms_no_bias", block + (not has_bias) * norms, "the norms have no bias here",
              "RMSNorm, in Llama and Qwen2, has a weight and nothing else.")]


def _feed_forward_causes(m, block, with_sizes) -> list[Cause]:
    matrix, two = m.hidden * m.ffn, m.mlp_matrices == 2
    return [
        Cause("one_matrix_feed_forward_part", block - (not two) * matrix,
              "one matrix of the feed-forward part is missing",
              "SwiGLU has three: gate, up and down."),
        Cause("one_matrix_too_in_feed", block + two * matrix,
              "there is one matrix too many in the feed-forward part",
              "GPT-2 has two: up and down. Llama and Qwen2 have three."),
        Cause("feed_forward_part_taken_4", with_sizes(ffn=4 * m.hidden),
              "the feed-forward part is taken as 4 times as wide as the model",
              f"It is m.ffn = {m.ffn} wide.")]


def _model_causes(m, total) -> list[Cause]:
    def with_sizes(**sizes) -> int:
        return count(replace(m, **sizes))

    causes = [
        Cause("head_counted", with_sizes(tied=False),
              "the head is counted, though it is tied to the embedding",
              "With m.tied the two are one matrix, stored once."),
        Cause("embedding_head_vocabulary_x_hidden", total - m.vocabulary * m.hidden,
              "an embedding or head of vocabulary x hidden is missing",
              "Without m.tied the head is a matrix of its own."),
        Cause("learned_positions_missing", with_sizes(positions=0),
              "the learned positions are missing",
              "GPT-2 has a second embedding, m.positions x hidden; for others m.positions is 0."),
        Cause("final_norm_missing", total - norm_size(m), "the final norm is missing",
              "One more norm stands after the last block."),
        Cause("final_norm_bias_missing", total - m.norm_bias * m.hidden,
              "the final norm's bias is missing", "GPT-2's norms have a weight and a bias."),
        Cause("only_one_block_counted", with_sizes(layers=1), "only one block is counted",
              "There are m.layers of them."),
        Cause("one_block_too_counted", with_sizes(layers=m.layers + 1),
              "one block too many is counted", "There are m.layers of them.")]
    return causes + pairs(causes, total)


SIZES = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary",
         "positions", "tied", "qkv_bias", "out_bias", "mlp_bias")


def show_models() -> Table:
    """A table of the models' sizes, from which all formulas start."""
    rows = [(name, *(f"{value:,}" if type(value) is int else str(value) for value in
                     (getattr(m, name) for m in model_sizes().values()))) for name in SIZES]
    return print_in_script(Table("sizes, by their names in m", ("", *model_sizes()), rows))


def show_block(name: str) -> Table:
    """A table of the parameters of one block of a well-known model, read off the model."""
    block = ground_truth.first_block(hf_configs.on_meta(hf_configs.config(name)))
    rows = [(label, " x ".join(map(str, p.shape)), f"{p.numel():,}")
            for label, p in block.named_parameters()]
    total = ("one block", "", f"{sum(p.numel() for p in block.parameters()):,}")
    return print_in_script(Table(f"{name}, block 0", ("parameter", "shape", "elements"),
                                 [*rows, total], total=True))


@shows("1.1")
def show_outside_blocks(block_parameters, model_parameters) -> Picture:
    """The share of each model's parameters that is in no block, in percent."""
    rows = []
    for name, m in model_sizes().items():
        _, _, block, total = ground_truth.counted_model(name)
        rows.append(Bar(name, 100 * (1 - m.layers * block / total),
                        100 * (1 - m.layers * block_parameters(m) / model_parameters(m)),
                        guessed("1.1") if name == "Llama-3-8B" else None,
                        colour=palette.MEMORY["parameters"]))
    return bars(rows, "%", "of the parameters are in no block (bar: the model itself)",
                source="counted", lesson=_lesson(rows))


def _lesson(rows) -> str:
    """The models with the largest and the smallest share."""
    most, least = (choose(rows, key=lambda row: row.measured) for choose in (max, min))
    return (f"Outside of blocks: {most.measured:.3g} % of {most.name}, {least.measured:.2g} % of "
            f"{least.name}")
