"""The charts and tables of activations and of checkpointing: exercises 1.4, 1.5 and 1.8, drawn with
the student's own functions."""

from dataclasses import replace

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import print_in_script, shows
from labs.memory_math import ground_truth, measurements
from labs.memory_math.checks.activations import LOGIT, SHOWN
from labs.memory_math.ground_truth import SAVED_PARTS
from labs.memory_math.scaffold import CheckpointingCost
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.activations import korthikanti
from labs.predictions.memory import predict
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory
from labs.training.presets import Preset

MB = 10**6
# Korthikanti et al., section 4: what a GPT layer saves, by part, in s·b·h. Together 34.
FORMULA = {"two norms": 4, "attention": 11, "feed-forward": 19, "checkpointed": 2}


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
    return bars(rows, "s·b·h", "bytes saved by one block in bf16 (GPT-2 with 1024 tokens)")


@shows("1.8")
def show_saved_parts(bytes_for_backward, layer_activations) -> Picture:
    """What the student's own meter counts in the parts of real blocks, in units of s·b·h, and what
    the formula says of those of GPT-2."""
    batch, sequence, hidden = 1, 128, 256
    unit, rows = batch * sequence * hidden, []
    formula = {"whole": layer_activations(batch, sequence, hidden, 4, True) / unit, **FORMULA}
    for model, parts in ground_truth.block_parts(batch, sequence, hidden).items():
        for part in parts:
            is_gpt2, counted = model == "GPT-2", bytes_for_backward(part.forward, list(part.held))
            rows.append(Bar(f"{model}: {part.name}", counted / unit,
                            formula[part.name] if is_gpt2 else None,
                            None if is_gpt2 or part.name != "two norms" else guessed("1.8"),
                            colour=palette.MEMORY["activations"]))
    return bars(rows, "s·b·h", "bytes that your function counts in bf16, attention fused")


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


@shows("Mixed precision")
def show_mixed_precision(preset: Preset) -> Table:
    """A table of what a rank holds that trains the preset's GPT-2 in fp32, and in bf16 with an fp32
    master copy: each of the model states, and activations."""
    fp32, mixed = measurements.measure_precisions(preset).values()
    names = ("parameters", "gradients", "optimizer state")
    pairs = [(name, fp32.states.by_name()[name], mixed.states.by_name()[name]) for name in names]
    pairs.append(("model states together", *(sum(pair[place] for pair in pairs)
                                             for place in (1, 2))))
    pairs.append(("activations after forward", fp32.activations, mixed.activations))
    rows = [(name, *(f"{size / MB:.2f}" for size in sizes), f"{sizes[0] / sizes[1]:.2f}x")
            for name, *sizes in pairs]
    return Table("MB of one rank, measured: states after backward, activations after forward",
                 ("", "fp32", "bf16, fp32 master", "fp32 takes"), rows)


@shows("1.5")
def show_checkpointing_cost(cost: CheckpointingCost, step_flops) -> Picture:
    """A step with checkpointing as a multiple of one without: FLOPs counted, time measured."""
    blocks, last, head = cost.matrices

    def formula(last) -> float:
        return step_flops(blocks, last, head, 1, True) / step_flops(blocks, last, head, 1, False)

    guess, flops = guessed("1.5"), cost.flops
    rows = [Bar("blocks whole again", flops[2] / flops[0], formula(0), guess, palette.PLAIN),
            Bar("as torch does it", flops[1] / flops[0], formula(last), guess, palette.PLAIN),
            Bar(f"time on this {'CPU' if cost.device == 'cpu' else 'GPU'}",
                cost.seconds[1] / cost.seconds[0], colour=palette.MUTED)]
    title = "the step without checkpointing (FLOPs counted, time measured)"
    if cost.device != "cpu":  # a CPU's seconds differ from run to run, and are no GPU's
        title = "{}\n{} without, {} with".format(title, *cost.timings)
    return bars(rows, "×", title)


@shows("1.5")
def show_checkpointing_memory(cost: CheckpointingCost) -> Picture:
    """Activations at the end of forward without and with checkpointing, measured and predicted."""
    names = ("nothing recomputed", "checkpointing")
    return memory_bars([MemoryRow(name, Memory(activations=kept), predicted)
                        for name, kept, predicted in zip(names, cost.kept, cost.predicted,
                                                         strict=True)],
                       "of activations at the end of forward")
