"""The pictures of notebook 02, each made from a run of the student's own code."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.manual_ddp import checks, measuring
from labs.pictures import curves, gradients, measured, palette, timelines
from labs.predictions import traffic as predicted
from labs.training import loop
from labs.training.presets import Preset
from labs.workers.launcher import launch


@shows("2.1")
def show_combine(combine):
    """The gradient of a batch in shards of 1, 1 and 10: whole, combined, plainly averaged."""
    whole, pieces = checks.gradients_of_shards([1, 1, 10])
    combined = checks.as_gradient(combine([piece.clone() for piece in pieces], [1, 1, 10]), whole)
    return gradients.rows({"the whole batch": whole, "your combine": combined,
                           "plain mean": sum(pieces) / len(pieces)})


@shows("2.3")
def show_gradients(average_gradients, ranks: int = 2):
    """The gradients of every rank, before and after the student's function averaged them."""
    return gradients.before_and_after(
        launch(measuring.gradients_before_and_after, average_gradients, ranks=ranks, quiet=True,
               device="cpu"))


@shows("2.7")
def show_flights(wrap, preset: Preset):
    """When each gradient of rank 0 got ready, and when its bucket left and arrived."""
    line, buckets = launch(_flight, wrap, preset, ranks=preset.ranks, quiet=True, verify=False)[0]
    return timelines.flights(line, buckets)


def _flight(wrap, preset):
    def marked(model):
        loop.mark_gradients(model)
        return wrap(model)

    module, optimizer = measuring.build(marked, preset)
    warm, batch = measuring.batches(preset, 2)
    measuring.record(module, optimizer, warm)
    return measuring.record(module, optimizer, batch), measuring.bucket_names(module)


@shows("2.7")
def show_training(wrap, preset: Preset, steps: int = 30):
    """The loss on `preset.ranks` ranks beside one rank's with the whole batch: the same model, the
    same batches, the plain loop."""
    alone = measuring.train(lambda model: model, preset, steps, ranks=1)
    together = measuring.train(wrap, preset, steps, ranks=preset.ranks)
    difference = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    return curves.losses({"1 rank, the whole batch": alone,
                          f"{preset.ranks} ranks, a share each": together}, difference)


@shows("2.10")
def show_timelines(results, *variants):
    """One recorded step of the named variants (all, if none is named), on every rank."""
    chosen = variants or results.timelines
    return timelines.by_rank({name: results.timelines[name] for name in chosen})


@shows("2.10")
def show_calls(results):
    """Collectives per step of each variant, with the count that its buckets predict."""
    rows = [measured.Bar(name, len(calls), _predicted_calls(results, name),
                         guessed("calls per step, bucketed") if "bucketed" in name else None)
            for name, calls in results.traffic.items()]
    return measured.bars(rows, "calls", "of all_reduce per step and rank")


def _predicted_calls(results, name):
    if results.buckets[name]:
        return len(results.buckets[name])
    return results.tensors if "per parameter" in name else None


@shows("2.10")
def show_bytes(results):
    """Bytes per step of each variant, with the predicted 4 bytes per parameter."""
    want = predicted.gradient_bytes(results.parameters) / 1e6
    rows = [measured.Bar(name, sum(call.bytes for call in calls) / 1e6, want)
            for name, calls in results.traffic.items()]
    return measured.bars(rows, "MB", "all-reduced per step and rank (logical bytes)")


@shows("2.10")
def show_throughput(results):
    """Tokens per second of all ranks together, by variant, and the student's guess."""
    rows = [measured.Bar(name, rate, guessed=_guess(results, name), colour=palette.RANKS[0])
            for name, rate in results.tokens_per_s.items()]
    return measured.bars(rows, "tokens/s", "of all ranks together (median of turns)")


def _guess(results, name):
    ratio = guessed("overlapped, as a share of torch DDP's throughput")
    if ratio is None or "overlapped" not in name:
        return None
    return ratio * results.tokens_per_s["torch DDP"]


@shows("2.10")
def show_shares(results):
    """Where a recorded step went, mean over ranks: the phases, and exposed communication."""
    return timelines.shares(results.timelines)
