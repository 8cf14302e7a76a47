"""Exercise 6.9: FLOPs per token, MFU and HFU of a run."""

from collections.abc import Callable
from dataclasses import replace

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_numbers,
    require_positive,
    require_signature,
)
from labs.checks.verdicts import check, shows
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.step_time.reported_runs import (
    ReportedRun,
    RunEfficiency,
    efficiency_of,
    printed_mfu,
    reported_runs,
)

NAMES = ("6N", "FLOPs per token", "MFU", "HFU")
PUBLISHED = ("mosaic-096", "mosaic-158", "mosaic-012", "mosaic-036")  # both GPUs, 2k and 32k tokens
_PEAK = "Training uses the dense peak: half of a rate that is printed with sparsity."
_LOOK_UP = ("An embedding that is not tied is looked up, not multiplied: leave its vocabulary × "
            "hidden parameters out of N.")
_TIED = "A tied matrix is counted once, and it is multiplied: it is the head."
_ATTENTION = "Attention adds 12·L·h·s for each token, whatever N is."
SIX_N: list[Mistake] = [
    Mistake("look_up_embedding_counted_product", lambda run: 6 * run.parameters,
            "the look-up of the embedding is counted as a product", _LOOK_UP),
    Mistake("head_product_left_out", lambda run: 6 * (run.parameters - run.vocabulary * run.hidden),
            "the head's product is left out", _TIED),
    Mistake("matrix_vocabulary_counted_once",
            lambda run: 6 * (run.parameters + run.vocabulary * run.hidden),
            "a matrix of the vocabulary is counted once more than the model has it", _TIED),
    Mistake("head_product_left_out_together",
            lambda run: 6 * (run.parameters - (0 if run.tied else 2 * run.vocabulary * run.hidden)),
            "the head's product is left out together with the look-up", "If not tied, there are "
            "two matrices of the vocabulary: only the embedding is looked up."),
    Mistake("two_matrices_vocabulary_left_out",
            lambda run: 6 * (run.parameters - 2 * run.vocabulary * run.hidden),
            "two matrices of the vocabulary are left out", _TIED),
    Mistake("matrix_left_out_where_tied",
            lambda run: 6 * (run.parameters - run.tied * run.vocabulary * run.hidden),
            "a matrix is left out where it is tied, not where it is not", _TIED),
    Mistake("forward_alone", lambda run: run.six_n / 3, "that is forward alone",
            "Backward makes two products for each one of forward: 2 + 4 FLOPs per parameter."),
    Mistake("number_parameters", lambda run: run.six_n / 6, "that is the number of parameters",
            "6 FLOPs for each."),
    Mistake("one_flop_for_two", lambda run: run.six_n / 2,
            "a multiplication and an addition are two operations", "2 + 4 FLOPs per parameter."),
    Mistake("forward_counted_twice", lambda run: 8 * run.six_n / 6,
            "forward is counted twice, as with recomputation",
            "These are the model's FLOPs: recomputation adds to HFU alone."),
]
FLOPS: list[Mistake] = [
    Mistake("attention_products_missing", lambda run: run.six_n, "attention's products are missing",
            _ATTENTION),
    Mistake("attention_forward_alone", lambda run: run.six_n + run.attention / 3,
            "attention of forward alone", "4·L·h·s is forward; backward has twice as much."),
    Mistake("attention_counted_twice", lambda run: run.six_n + 2 * run.attention,
            "attention is counted twice", _ATTENTION),
    Mistake("half_attention", lambda run: run.six_n + run.attention / 2, "half of attention",
            "By convention the whole s × s square counts, causal or not: 12·L·h·s."),
    Mistake("attention_one_layer_alone", lambda run: run.six_n + run.attention / run.layers,
            "attention of one layer alone", _ATTENTION),
    Mistake("attention_sequence", lambda run: run.six_n + run.attention * run.sequence,
            "attention of a full sequence", "For one token: 12·L·h·s, not s²."),
    Mistake("attention_without_sequence", lambda run: run.six_n + run.attention / run.sequence,
            "attention without the sequence", _ATTENTION),
    Mistake("for_sequence", lambda run: run.flops * run.sequence, "that is for a sequence",
            "For one token."),
    Mistake("recomputed_counted", lambda run: run.flops + run.recomputed,
            "what is recomputed is counted",
            "These are the FLOPs that the model needs: recomputation adds to HFU alone."),
]


def _share(run: RunEfficiency, flops, peak=None, tokens_per_s=None) -> float:
    return flops * (tokens_per_s or run.tokens_per_s / run.gpus) / (peak or run.peak)


SHARES: list[Mistake] = [
    Mistake("sparse_peak",
            lambda run: _share(run, run.flops, run.sheet_tflops * 1e12),
            "that is a share of the data sheet's rate with sparsity", _PEAK),
    Mistake("sparse_peak",
            lambda run: _share(run, run.flops + run.recomputed, run.sheet_tflops * 1e12),
            "that is a share of the data sheet's rate with sparsity", _PEAK),
    Mistake("data_sheet_rate_halved_though",
            lambda run: _share(run, run.flops, run.sheet_tflops * 5e11),
            "the data sheet's rate is halved though it is the dense one",
            "Halve it where run.sparse is True."),
    Mistake("one_gpu_peak",
            lambda run: _share(run, run.flops, tokens_per_s=run.tokens_per_s),
            "the tokens of all GPUs are divided by the peak of one", "Divide by run.gpus."),
    Mistake("one_gpu_peak",
            lambda run: _share(run, run.flops + run.recomputed, tokens_per_s=run.tokens_per_s),
            "the tokens of all GPUs are divided by the peak of one", "Divide by run.gpus."),
    Mistake("divided_gpus_twice", lambda run: run.mfu / run.gpus,
            "that is divided by the GPUs twice", "run.tokens_per_s is of all GPUs together."),
    Mistake("binary_tflop", lambda run: run.mfu * 1e12 / 2**40, "a TFLOP is taken as 2^40",
            "Rates are decimal: 1e12."),
    Mistake("binary_tflop", lambda run: run.hfu * 1e12 / 2**40, "a TFLOP is taken as 2^40",
            "Rates are decimal: 1e12."),
    Mistake("attention_products_missing", lambda run: _share(run, run.six_n),
            "attention's products are missing", _ATTENTION),
    Mistake("in_percent", lambda run: 100 * run.mfu, "that is in percent",
            "A share lies between 0 and 1."),
    Mistake("in_percent", lambda run: 100 * run.hfu, "that is in percent",
            "A share lies between 0 and 1."),
    Mistake("tflop_s_taken_flop_s", lambda run: run.mfu * 1e12, "TFLOP/s are taken as FLOP/s",
            "One TFLOP/s is 1e12 FLOP/s."),
    Mistake("peak_over_reached", lambda run: 1 / run.mfu, "that is the peak over what is reached",
            "The other way round."),
]


def _again(words, hint, *, selective=lambda run: run.attention / 3,
           full=lambda run: run.flops / 3) -> Mistake:
    """HFU with other FLOPs that run again than the right ones."""
    count = {"none": lambda run: 0, "selective": selective, "full": full}
    return Mistake("wrong_recomputed_flops",
                   lambda run: run.mfu * (1 + count[run.recompute](run) / run.flops), words, hint)


_FULL = "All of forward runs again, attention's too: a third of the FLOPs per token."
MFU: list[Mistake] = [
    Mistake("hfu_counts_recomputed", lambda run: run.hfu,
            "that is HFU: it counts what is recomputed",
            "MFU counts what the model needs, so recomputation does not raise it."),
    Mistake("counts_another_forward", lambda run: run.mfu * 4 / 3, "that counts another forward",
            "MFU counts what the model needs.")]
HFU: list[Mistake] = [
    Mistake("mfu_recomputed_missing", lambda run: run.mfu,
            "that is MFU: what is recomputed is missing",
            "The GPU computes needed FLOPs and recomputed ones."),
    Mistake("all_forward_again", lambda run: run.mfu * 4 / 3, "that is all of forward again",
            "\"selective\" recomputes a third of attention alone, \"none\" nothing."),
    _again("all of attention is counted again",
           "Only its forward runs again: a third of 12·L·h·s.",
           selective=lambda run: run.attention),
    _again("a third of attention's forward is counted again",
           "All of attention's forward runs again: 4·L·h·s, a third of 12·L·h·s.",
           selective=lambda run: run.attention / 9),
    _again('what "selective" runs again is missing',
           "Attention's forward: a third of 12·L·h·s.", selective=lambda run: 0),
    _again('what "full" runs again is missing',
           "All of forward: a third of the FLOPs per token.", full=lambda run: 0),
    _again('"full" counts no attention again', _FULL, full=lambda run: run.six_n / 3),
    _again('"full" counts no attention again, and "selective" nothing', _FULL,
           full=lambda run: run.six_n / 3, selective=lambda run: 0),
    _again('"full" counts attention alone again', _FULL, full=lambda run: run.attention / 3),
    _again('"full" counts 6N once more', _FULL, full=lambda run: run.six_n),
    _again('"full" counts all FLOPs once more',
           "Only forward runs again: a third of forward and backward.",
           full=lambda run: run.flops),
    _again('"selective" and "full" are exchanged',
           '"selective" is attention\'s forward, "full" all of forward.',
           selective=lambda run: run.flops / 3, full=lambda run: run.attention / 3),
    Mistake("runs_again_subtracted", lambda run: run.mfu * (1 - run.recomputed / run.flops),
            "what runs again is subtracted",
            "The GPU computes it in addition: HFU is never below MFU."),
    Mistake("runs_again_divided", lambda run: run.mfu / (1 - run.recomputed / run.flops),
            "what runs again is divided by",
            "Add it to the FLOPs per token: HFU is the share of the sum."),
    Mistake("share_runs_again_alone", lambda run: run.mfu * run.recomputed / run.flops,
            "that is the share of what runs again alone",
            "The GPU computes needed FLOPs and recomputed ones."),
    Mistake("step_counted_twice", lambda run: run.mfu * 2, "the whole step is counted twice",
            "Only forward runs again: a third of forward and backward."),
    Mistake("half_counted_again", lambda run: run.mfu * 3 / 2, "a half is counted again",
            "Forward is a third of forward and backward.")]
MISTAKES = (SIX_N, FLOPS, MFU + SHARES, HFU + SHARES)
_HINTS = ("6 for each parameter that is multiplied: the head's, and not those that are looked up.",
          "6N, and 12·L·h·s for attention.",
          "FLOPs per token × tokens per second of one GPU / dense FLOP/s of one GPU.",
          'As MFU, with what runs again on top: a third of 12·L·h·s with "selective", a third of '
          'the FLOPs per token with "full".')


@check("6.9")
def check_utilization(utilization):
    """Four numbers for runs whose sizes are drawn at random, then for published ones."""
    require_signature(utilization, ("run",))
    # copies: an answer that changes a run must not change it for the next one
    given = [*drawn(), *(replace(reported_runs()[name]) for name in PUBLISHED)]
    kept = UnchangedInputs("utilization", runs=[vars(run) for run in given])
    answers = [require_numbers(utilization(run), NAMES, _named(run)) for run in given]
    kept.judge()
    runs = list(map(efficiency_of, given))
    # column by column: a wrong MFU is often a wrong number of FLOPs
    for column, name in enumerate(NAMES):
        got = [answer[column] for answer in answers]
        for at, run in enumerate(runs):
            judge_number(got[at], _right(run)[column],
                         common_cause(MISTAKES[column], runs, got, at), f"{_named(run)}: {name}",
                         "" if column > 1 else "FLOPs", _HINTS[column])
    for name, answer in zip(PUBLISHED, answers[-len(PUBLISHED):], strict=True):
        # the convention is the reports' own: by another one no figure could be compared with theirs
        judge_number(answer[2], printed_mfu(name), (), f"{name}: the MFU that is printed",
                     rel_tol=3e-3)
    return (f"the MFU that {len(PUBLISHED)} published runs print, and right for "
            f"{len(given) - len(PUBLISHED)} random runs")


def _right(run) -> tuple[float, ...]:
    return run.six_n, run.flops, run.mfu, run.hfu


def _named(run) -> str:
    return (f"{run.name}, {'tied' if run.tied else 'not tied'}, sheet {run.sheet_tflops:g}"
            f"{' with sparsity' * run.sparse}, recomputes {run.recompute}")


def drawn() -> list[ReportedRun]:
    """Runs of every kind: tied or not, each recomputation, a dense and a sparse data sheet, one GPU
    and many. Sizes are random, so that no table of answers fits."""
    rng = new_generator()
    kinds = [(tied, recompute) for tied in (True, False)
             for recompute in ("none", "full", "selective")]
    found = []
    for number, (tied, recompute) in enumerate(kinds):
        sheet = ("H100", "A100-80", "H200", "A10", "T4", "H100")[number]
        found.append(_drawn(rng, f"run {number + 1}", tied, recompute, sheet))
    # one data sheet may be printed either way: the GPU's name does not tell
    found.append(replace(found[1], name="run 7", sheet_tflops=624, sparse=True, gpus=1))
    return found


def _drawn(rng, name, tied, recompute, sheet) -> ReportedRun:
    layers, hidden = rng.randint(4, 48), 64 * rng.randint(4, 64)
    vocabulary, gpus = rng.randint(5_000, 150_000), rng.randint(2, 512)
    parameters = 12 * layers * hidden**2 + (1 if tied else 2) * vocabulary * hidden
    card = hardware.gpu(sheet)
    run = ReportedRun(name, parameters, vocabulary, tied, layers, hidden,
                      128 * rng.randint(4, 128), recompute, gpus, card.sheet_tflops, card.sparse,
                      1.0)
    # The throughput is chosen so that the MFU is between 0.2 and 0.5.
    slow = efficiency_of(run)  # at one token per second
    return replace(run, tokens_per_s=rng.uniform(0.2, 0.5) / slow.mfu)


SHOWN = ("mosaic-096", "mosaic-088", "mosaic-038", "mosaic-092", "mosaic-036")


@shows("6.9")
def show_utilization(utilization: Callable, *own: ReportedRun) -> Table:
    """Returns a table of published runs, and of the student's own: the shares by the student's
    function, the one that the report prints, the MFU without attention's masked half, and two
    slips."""
    rows = []
    for name in SHOWN:
        run = replace(reported_runs()[name])  # a copy, which the student may change
        rows.append((*_row(run, utilization), f"{100 * printed_mfu(name):.1f}"))
    rows += [(*_row(run, utilization), "–") for run in own]
    return Table("share of the dense peak, in percent", (
        "run", "tokens of a sequence", "with 6N alone", "without the masked half",
        "against the sparse rate", "your HFU",
        "your MFU", "printed MFU"), rows)


def _row(run, utilization) -> tuple:
    six_n, flops, mfu, hfu = require_numbers(utilization(run), NAMES, run.name)
    require_positive(flops, f"{run.name}, {NAMES[1]}")
    sheet = run.sheet_tflops * (1 if run.sparse else 2)
    halved = require_numbers(utilization(replace(run, sheet_tflops=sheet, sparse=False)), NAMES,
                             run.name)[2]
    return (f"{run.name}, recomputes {run.recompute}", f"{run.sequence:,}",
            *(f"{100 * share:.1f}" for share in (
                mfu * six_n / flops, mfu * (six_n + flops) / 2 / flops, halved, hfu, mfu)))
