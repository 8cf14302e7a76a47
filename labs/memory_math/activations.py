"""Exercise 1.4: what forward saves, of a layer and of a model."""

from dataclasses import replace

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, pairs, require_signature
from labs.checks.verdicts import check, print_in_script, shows
from labs.memory_math import ground_truth, measurements
from labs.memory_math.ground_truth import SAVED_PARTS, random_sizes, saved_bytes
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory.activations import korthikanti
from labs.predictions.memory.parameters import shape_of
from labs.predictions.memory.predict import predict
from labs.predictions.memory.shape import Shape
from labs.training import hf_configs
from labs.training.memory_categories import GB

SHOWN = (3, 96, 128, 4)  # batch, sequence, hidden, heads of the block that the notebook shows
LOGIT = 12  # bytes at the loss's backward: log-softmax, its gradient, the logits' gradient, in fp32


@check("1.4")
def check_activations(layer_activations, activations):
    """A layer's bytes against a real block's saved tensors, a model's against sums of layers."""
    require_signature(layer_activations, ("batch", "sequence", "hidden", "heads", "fused"))
    require_signature(activations, ("m", "batch", "sequence", "checkpointing"))
    # Random sizes reject an answer that fits only the block in the notebook.
    for sizes in (SHOWN, random_sizes(), random_sizes()):
        for fused in (True, False):  # what is wrong without scores is found without them
            _judge_layer(layer_activations, *sizes, fused)
    rng = new_generator()
    for name, m in _models():
        for batch, sequence in ((1, 1024), (rng.randint(2, 9), 8 * rng.randint(20, 99))):
            for checkpointing in (False, True):
                _judge_model(activations, name, m, batch, sequence, checkpointing)
    batch, sequence, _, heads = SHOWN
    share = statistics_bytes(batch, sequence, heads, True) / saved_bytes(*SHOWN, True)
    return ("to the byte what real GPT-2 blocks save, except for the statistics of norms and "
            f"softmax: {100 * share:.1f} % of the block that was shown")


def _models() -> list[tuple[str, Shape]]:
    """Known models, and one whose layer exceeds its logits: it rejects answers without the
    maximum."""
    known = [(name, shape_of(hf_configs.config(name))) for name in
             ("GPT-2", "Llama-3-8B", "Llama-2-7B")]
    return [*known, ("a GPT-2 over bytes", replace(known[0][1], vocabulary=256))]


def statistics_bytes(batch: int, sequence: int, heads: int, fused: bool) -> int:
    """Bytes that the formula leaves out: two numbers in 16 bits per token and norm, and fused
    attention's one in fp32 per token and head."""
    return 8 * batch * sequence + (4 * batch * heads * sequence if fused else 0)


def _judge_layer(layer_activations, batch, sequence, hidden, heads, fused):
    what = (f"a real block, {batch} x {sequence} tokens, hidden {hidden}, {heads} heads, "
            f"{'fused' if fused else 'eager'} attention")
    expected = (saved_bytes(batch, sequence, hidden, heads, fused)
                - statistics_bytes(batch, sequence, heads, fused))
    judge_number(layer_activations(batch, sequence, hidden, heads, fused), expected,
                 _layer_causes(batch, sequence, hidden, heads, fused, expected), what, "bytes",
                 "Add up the tensors of lab.show_saved_tensors, in units of s·b·h.")


def _layer_causes(b, s, h, a, fused, real) -> list[Cause]:
    # In bytes. Of each score: the softmax's and the dropout's output in 16 bits, and a mask of a
    # byte.
    size, scores = s * b * h, 5 * a * s * s * b
    a_mask = 0 if fused else scores // 5
    causes = [
        Cause("scores_inside_attention", 34 * size,
              "the scores inside attention, 5as/h, are missing",
              "They grow with the square of the sequence."),
        Cause("scores_counted_for_one_sequence", real - (not fused) * (b - 1) * 5 * a * s * s,
              "the scores are counted for one sequence", "There are a·b·s² of them: b sequences."),
        Cause("mask_scores_missing", real - a_mask, "the mask of the scores is missing",
              "It has a byte for each score."),
        Cause("mask_scores_counted_two_bytes", real + a_mask,
              "the mask of the scores is counted with two bytes",
              "A mask has one byte for each score."),
        Cause("dropout_mask_missing", real - size, "a dropout mask is missing",
              "Each has one byte for each of s·b·h numbers."),
        Cause("two_dropout_masks", real - 2 * size,
              "two dropout masks, or one tensor in 16 bits, are missing",
              "lab.show_saved_tensors lists them all."),
        Cause("norms_statistics_counted", real + 8 * b * s, "the norms' statistics are counted",
              "Leave them out."),
        Cause("statistics_counted", real + statistics_bytes(b, s, a, fused),
              "the statistics are counted", "Leave them out."),
        Cause("fused_attention_never_writes", 34 * size + scores,
              "fused attention never writes the scores out",
              "Leave 5as/h out where `fused` is True."),
        Cause("counted_in_elements", 2 * real,
              "2x: that is as if 34 counted elements; it counts bytes",
              "sbh(34 + 5as/h) is in bytes already."),
        Cause("half_counted_in_16_bit", real / 2, "half: counted in 16-bit elements",
              "The answer is in bytes."),
        Cause("batch_missing", real / b, "the batch is missing", "Every sequence of it is saved."),
        Cause("inputs_missing", real - 10 * size, "10sbh is missing: two norms' inputs, and what "
              "attention's and the feed-forward part's outputs save",
              "lab.show_saved_tensors lists them all.")]
    return [*causes, Cause("checkpoint_only", 2 * size,
                           "2sbh is what checkpointing keeps", "Here nothing is dropped."),
            *pairs(causes, real)]


def _judge_model(activations, name, m, batch, sequence, checkpointing):
    what = (f"{name}, {batch} x {sequence} tokens, "
            f"{'with' if checkpointing else 'without'} checkpointing")
    expected = model_activations(m, batch, sequence, checkpointing)
    judge_number(activations(m, batch, sequence, checkpointing), expected,
                 _model_causes(m, batch * sequence, checkpointing, expected), what, "bytes",
                 "What all layers keep, and what comes on top at the peak.")


def model_activations(m: Shape, batch: int, sequence: int, checkpointing: bool) -> int:
    """Bytes of activations at the peak, as the notebook counts them: what all layers keep, and on
    top the loss's 12 bytes for each logit or, with checkpointing, one recomputed layer, whichever
    is more."""
    size = batch * sequence * m.hidden
    layer, logits = 34 * size, LOGIT * batch * sequence * m.vocabulary
    if checkpointing:
        return 2 * size * m.layers + max(layer, logits)
    return layer * m.layers + logits


_LOGITS = ("At the peak the loss holds three fp32 numbers, 12 bytes, for each of batch x sequence "
           "x vocabulary logits.")


def _model_causes(m, tokens, checkpointing, real) -> list[Cause]:
    layer, logits = 34 * tokens * m.hidden, LOGIT * tokens * m.vocabulary
    inputs = 2 * tokens * m.hidden * m.layers  # what checkpointing keeps
    kept = inputs if checkpointing else layer * m.layers
    top = real - kept
    # Where logits != top, a recomputed layer is on top, and a mistake about logits changes nothing.
    causes = [
        Cause("logits_missing", real - (logits == top) * logits, "the logits are missing", _LOGITS),
        *(Cause("logits_counted_bytes", real - (logits == top) * (LOGIT - counted) * logits / LOGIT,
                f"the logits are counted with {counted} bytes each", _LOGITS)
          for counted in (1, 2, 4, 6, 8, 10, 16)),
        Cause("only_one_layer_counted", top + kept // m.layers, "only one layer is counted",
              "There are m.layers of them.")]
    if not checkpointing:
        return causes + pairs(causes, real)
    causes += [
        Cause("layer_input_counted_in_elements", real - kept / 2,
              "a layer's input is counted in elements", "In 16 bits: 2sbh bytes."),
        Cause("peak_beside_checkpoints_missing", kept,
              "what comes on top of the checkpoints is missing",
              "At the loss it is the logits, later one layer that is computed again.")]
    return [
        *causes,
        Cause("logits_recomputed_layer_never", inputs + layer + logits,
              "the logits and the recomputed layer are never there together",
              "The logits are gone when backward reaches the layers: take max."),
        Cause("nothing_dropped", layer * m.layers + logits, "nothing was dropped",
              "With checkpointing a layer keeps its input alone, 2sbh."),
        Cause("layer_computed_again_missing", inputs + logits,
              "the layer that is computed again is missing",
              "One layer at a time is recomputed, 34sbh."),
        Cause("logits_missing", inputs + layer, "the logits are missing", _LOGITS),
        *pairs(causes, real)]


def show_saved_tensors() -> Table:
    """A table of the tensors that a real GPT-2 block in bf16 saves for backward, in s·b·h."""
    batch, sequence, hidden, heads = SHOWN
    found = ground_truth.saved_tensors(*SHOWN, fused=False)
    total, unit = sum(tensor.nbytes for tensor in found), batch * sequence * hidden
    # Another version of torch may save other tensors: then they have no names.
    parts = SAVED_PARTS if len(SAVED_PARTS) == len(found) else [""] * len(found)
    rows = [(part, " x ".join(map(str, shape)), str(dtype).removeprefix("torch."),
             f"{nbytes:,}", f"{nbytes / unit:.3g}")
            for part, (nbytes, shape, dtype) in zip(parts, found, strict=True)]
    return print_in_script(Table(
        f"GPT-2 block in bf16 with dropout and eager attention: batch b = {batch}, sequence "
        f"s = {sequence}, hidden h = {hidden}, heads a = {heads}",
        ("saved for backward", "shape", "type", "bytes", "in s·b·h"),
        [*rows, ("together", "", "", f"{total:,}", f"{total / unit:.4g}")], total=True))


@shows("1.4")
def show_layer_activations(layer_activations) -> Picture:
    """What real blocks save, in units of s·b·h, and what the student's formula says."""
    m, batch, sequence = shape_of(hf_configs.config("GPT-2")), 1, 1024
    unit, rows = batch * sequence * m.hidden, []
    for fused, name in ((False, "GPT-2, eager attention"), (True, "GPT-2, fused attention")):
        sizes = batch, sequence, m.hidden, m.heads, fused
        rows.append(Bar(name, ground_truth.saved_bytes(*sizes) / unit,
                        layer_activations(*sizes) / unit, None if fused else guessed("1.4"),
                        colour=palette.MEMORY["activations"]))
    llama = ground_truth.llama_saved_bytes(1, 128, 256) / (128 * 256)
    rows.append(Bar("Llama-3's proportions, fused", llama,
                    colour=palette.MEMORY["activations"]))
    eager, fused = rows[0].measured, rows[1].measured
    return bars(rows, "s·b·h", "bytes saved by one block in bf16 (GPT-2 with 1024 tokens)",
                lesson=f"Fused attention: a block saves {eager / fused:.1f} times fewer bytes than "
                       "with eager attention")


@shows("1.4")
def show_activations(activations) -> Table:
    """A table for Llama-3-8B with a long sequence: what is kept, what comes on top, and what is
    predicted from every tensor that torch allocates."""
    config, batch, sequence = hf_configs.config("Llama-3-8B"), 1, 8192
    m = shape_of(config)
    checkpoints = m.layers * korthikanti(batch, sequence, m.hidden, m.heads, recompute="full")
    # On 8 ranks the states are small enough that the step's peak is at the loss.
    real = predict(config, batch=batch, sequence=sequence, recipe="bf16", checkpointing="full",
                   device="cuda", strategy="fsdp2", ranks=8, adamw="fused")["peak"].activations
    rows = [("without checkpointing", activations(m, batch, sequence, False)),
            ("with checkpointing", activations(m, batch, sequence, True)),
            (f"   its {m.layers} checkpoints", checkpoints),
            (f"   the loss, {LOGIT} bytes a logit", LOGIT * batch * sequence * m.vocabulary),
            ("   one layer, computed again", 34 * batch * sequence * m.hidden),
            ("with checkpointing, tensor by tensor", real)]
    return Table(f"Llama-3-8B, {batch} x {sequence:,} tokens: GB of activations at the peak",
                 ("", "GB", "of the checkpoints"),
                 [(name, f"{size / GB:,.3g}", f"{size / checkpoints:.2f}x")
                  for name, size in rows])


@shows("Logits")
def show_logits() -> Table:
    """A table of the bytes that a step holds for each logit, measured in fp32 and in bf16."""
    found = measurements.measured_logits()
    rows = [(when, *(f"{found[name][when]:.1f}" for name in found)) for when in found["fp32"]]
    return Table("bytes that a step holds for each logit, measured on a small Llama",
                 ("", *(f"model in {name}" for name in found)), rows)


@shows("1.4")
def show_sequence_lengths(layer_activations, activations) -> Table:
    """A table of the GB of activations of Llama-2-7B for longer and longer sequences: eager
    attention, fused attention, fused attention with checkpointing, and the same with a loss in
    chunks, which keeps no logits."""
    config, rows = hf_configs.config("Llama-2-7B"), []
    m = shape_of(config)
    for thousands in (1, 2, 4, 8, 16, 32, 64, 128):
        sequence = 1024 * thousands
        fused, checkpointed = (activations(m, 1, sequence, kind) for kind in (False, True))
        scores = m.layers * (layer_activations(1, sequence, m.hidden, m.heads, False)
                             - layer_activations(1, sequence, m.hidden, m.heads, True))
        # without logits the peak is in a layer that backward computes again
        chunked = activations(replace(m, vocabulary=0), 1, sequence, True)
        sizes = (size / GB for size in (fused + scores, fused, checkpointed, chunked))
        rows.append((f"{thousands}k", *(f"{size:,.0f}" if size >= 100 else f"{size:.3g}"
                                        for size in sizes)))
    kept = predict(config, batch=1, sequence=4096, recipe="bf16", device="cuda")["forward"]
    longest = [predict(config, batch=1, sequence=131072, recipe="bf16", device="cuda",
                       checkpointing="full", loss=loss)["peak"].activations / GB
               for loss in ("fp32", "fused")]
    room = hardware.gpu("A100-80").usable / GB
    return Table("GPT layers with the sizes of Llama-2-7B, one sequence: GB of activations at the "
                 "peak, by your functions",
                 ("tokens", "eager attention", "fused attention", "fused, checkpointing",
                  "and loss in chunks"), rows,
                 note=f"An A100-80 has {room:.1f} GB. Llama's own layers save somewhat more: for "
                      f"4k tokens {kept.activations / GB:.0f} GB are predicted at forward's end; "
                      f"for 128k with checkpointing {longest[0]:.0f} GB at the peak, and "
                      f"{longest[1]:.0f} with a loss in chunks.")
