"""Exercise 7.5: a loss of logits of which each rank has its part, and a Llama that is trained with
it: embedding, head and loss are parallel over the vocabulary, the layers between are
not sharded."""

import copy
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from labs.checks.explanations import Found, LayerMistake
from labs.checks.guesses import guessed
from labs.checks.invariants import (
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_step,
)
from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.checks.reference import Reference
from labs.checks.student_code import message_of, own_place
from labs.checks.verdicts import LAUNCH_SECONDS, Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions.communication import traffic
from labs.tensor_parallel.groups import groups_to_try
from labs.tensor_parallel.picture_records import (
    LOSS_TOKENS,
    LOSS_VOCABULARY,
    LossCost,
    gathered_cross_entropy,
    record_loss_cost,
)
from labs.tensor_parallel.vocabulary_loss import MOST_PER_TOKEN, try_loss
from labs.tensor_parallel.whole_batch import (
    ADAMW,
    MISTAKES,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.training import models
from labs.workers.launcher import launch

VOCABULARY = 480  # more than a byte has, so that logits are large beside the hidden states
SIZES = dict(layers=1, hidden=16, heads=4, kv_heads=2, context=16, intermediate=24,
             vocabulary=VOCABULARY)
BATCH, TOKENS = 3, 10
# (ranks, ranks of the group) -> which models are trained: with one weight for embedding and head,
# or with two. Each costs a second.
_TIED = {(2, 2): (False, True), (4, 4): (True, False), (4, 2): (True,)}
NAMES = ("model.embed_tokens.weight", "lm_head.weight")
HINTS = {
    "parameters": "Rows of the embedding and of the head have memory of their own, and nothing "
                  "else keeps the full ones.",
    "gradients": "A gradient is as large as its parameter: this rank's rows.",
    "optimizer_state": "The optimizer has two numbers for each of this rank's rows.",
    "rest": "Does anything keep the full weights?"}
MORE = {"all_reduce": "One at the embedding's end in forward, one where the head begins in "
                      "backward, and three numbers for each token in the loss."}


def _is_mixed(found: Found) -> bool:
    """Whether the rows of every rank are the sum, or the mean, of all ranks' rows."""
    if found.want.shape[0] % found.ranks:
        return False
    # The rows of rank r are added to the rows with the same local number of the other ranks: what
    # an all-reduce of the shards' gradients gives.
    mixed = sum(found.want.chunk(found.ranks)).repeat(found.ranks, 1)
    return any(close(factor * found.got, mixed) for factor in (1, found.ranks))


LAYER_MISTAKES = (
    LayerMistake(
        "summed_too_often",
        "the rows of several ranks are added up in it: it was reduced once too often",
        "A row's gradient is complete on the rank that has the row, what the embedding and what "
        "the head give together. The other ranks' gradients belong to other rows.",
        lambda found: found.got.dim() == 2 and _is_mixed(found)),)


@check("7.5")
def check_vocabulary_parallel(vocabulary_parallel_cross_entropy: Callable,
                              vocabulary_parallel: Callable):
    """vocabulary_parallel_cross_entropy(logits, targets, group), and vocabulary_parallel(model,
    group), which replaces embedding, head and loss of a Llama in place."""
    on_ranks(_try_both, vocabulary_parallel_cross_entropy, vocabulary_parallel)
    return ("loss and gradient are those of the full logits, also for logits of ±10,000 and in "
            "bf16, for three numbers of each token; 5 steps of Llama are the reference's, with an "
            "embedding and a head of their own and with a tied one, and each rank has 1/t of the "
            "vocabulary")


def _try_both(loss, vocabulary_parallel):
    try_loss(loss)
    for called, group in groups_to_try():
        number = dist.get_process_group_ranks(group)[0]  # other groups get other batches
        for tied in _TIED.get((dist.get_world_size(), dist.get_world_size(group)), ()):
            where = f"{called}, embedding and head {'tied' if tied else 'untied'}"
            try:
                _train(vocabulary_parallel, group, number, tied)
                if group is dist.group.WORLD:
                    _judge_bytes(vocabulary_parallel, group, tied)
            except Wrong as wrong:  # raised on all ranks alike
                raise wrong.said_of(where) from None


def whole_model(tied: bool) -> nn.Module:
    """The Llama that is trained, the same on every rank."""
    return models.move_to_rank(models.llama(**SIZES, tied=tied))


def _train(vocabulary_parallel, group, number, tied):
    kind, settings = ADAMW
    model = whole_model(tied)
    reference = Reference(copy.deepcopy(model), make_optimizer(kind, settings))
    vocabulary_parallel(model, group)
    optimizer = make_optimizer(kind, settings)(model)
    raise_on_all_ranks(_judge_tied, model, tied)
    # One forward before the training, where an exception of the model's own loss gets a sentence.
    raise_on_all_ranks(_judge_forward, model)
    train_on_whole_batch(model, optimizer, reference, whole_steps(5, BATCH, TOKENS, seed=number),
                         group, mistakes=MISTAKES, layer_mistakes=LAYER_MISTAKES)


def _judge_tied(model, tied):
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Two parameters where there was one would each get a part of the gradient.
    if tied and embedding.weight is not head.weight:
        raise Wrong("embedding and head were one parameter, and are two now",
                    "head.weight = embedding.weight: both have the same rows of this rank.",
                    code="tie_lost")
    if not tied and embedding.weight is head.weight:
        raise Wrong("embedding and head were two parameters, and are one now",
                    "Only where the model's head has the embedding's weight do both share rows.",
                    code="tied_wrongly")


def _judge_forward(model):
    try:
        model(**token_batches(1, BATCH, TOKENS)[0])
    except Exception as error:
        if own_place(error):
            raise
        # raised in code of the model, where a verdict finds no line of the student's
        raise Wrong(f"the model's forward raises {message_of(error)}",
                    "The model's own loss takes logits of the full vocabulary: replace it with "
                    "lab.set_loss.", code="own_loss_kept") from None


def _judge_bytes(vocabulary_parallel, group, tied):
    kind, settings = ADAMW

    def build():
        model = whole_model(tied)
        vocabulary_parallel(model, group)
        return model, make_optimizer(kind, settings)(model)

    batches = token_batches(2, BATCH, TOKENS)
    whole = whole_model(tied)
    sharded = [name for name, _ in models.trainable(whole) if name in NAMES]
    # build() makes its own model, so `whole` keeps its full weights for their sizes.
    traffic = record_step(lambda _: build(), whole, batches)
    # b·s·h once at the embedding, once at the head; and the loss.
    judge_collectives(traffic, {"all_reduce": 2}, Activations(1, BATCH, TOKENS, SIZES["hidden"]),
                      group, small=MOST_PER_TOKEN * BATCH * TOKENS, hints=MORE)
    # The invariant: 1/t of embedding and head, of their gradients and of AdamW's state. A tied
    # weight is listed once, because named_parameters names a shared parameter once.
    judge_resident_bytes(build, batches, ResidentBytes.of(
        whole, sharded, dist.get_world_size(group), rest=1024),
        "with a vocabulary-parallel embedding and head", HINTS)


LOSS_KINDS = ("gathered", "divided")
_ALIVE = 3  # fp32 numbers for each logit at the peak: the log-softmax or exp, and two gradients


@shows("7.5")
def show_loss_cost(vocabulary_parallel_cross_entropy: Callable, ranks: int = 4) -> Picture:
    """Draws both costs of the loss with gathered logits and with the student's function, on ranks
    of this machine; a note has what the formulas give for Llama-3's vocabulary."""
    functions = {"gathered": gathered_cross_entropy, "divided": vocabulary_parallel_cross_entropy}
    measured = {name: launch(record_loss_cost, function, ranks=ranks, quiet=True,
                             timeout=LAUNCH_SECONDS)[0] for name, function in functions.items()}
    guess = guessed("7.5")
    predicted = {name: predict_loss_cost(name, LOSS_TOKENS, LOSS_VOCABULARY, ranks)
                 for name in LOSS_KINDS}
    panels = [Panel("a rank sends", "MB", [measured[name].sent for name in LOSS_KINDS], 1e6,
                    [predicted[name].sent for name in LOSS_KINDS],
                    guessed=[None, guess and traffic.all_reduce(4 * guess * LOSS_TOKENS, ranks)],
                    colour=palette.PHASES["communication"]),
              Panel("memory at the peak", "MB", [measured[name].peak for name in LOSS_KINDS], 1e6,
                    [predicted[name].peak for name in LOSS_KINDS],
                    colour=palette.MEMORY["activations"])]
    rows = ["logits\ngathered", "logits\nsharded"]
    fewer, less = (getattr(measured["gathered"], part) / getattr(measured["divided"], part)
                   for part in ("sent", "peak"))
    numbers = measured["divided"].sent / traffic.all_reduce(4 * LOSS_TOKENS, ranks)
    return side_by_side(
        rows, panels, note=_of_llama_3(ranks),
        lesson=f"Sharded logits: {fewer:,.0f} times fewer bytes sent, {less:.2g} times less memory",
        answer=marks.answered(guess, numbers, "numbers for each token"))


def predict_loss_cost(name: str, tokens: int, vocabulary: int, ranks: int) -> LossCost:
    """By formula: gathered logits send (t-1)/t · b·s·v numbers, sharded ones an all-reduce of three
    for each token; at the peak `_ALIVE` fp32 numbers for each logit that the loss sees are alive.
    """
    logits = tokens * vocabulary
    sent = (traffic.all_gather(4 * logits, ranks) if name == "gathered"
            else traffic.all_reduce(3 * 4 * tokens, ranks))
    return LossCost(sent, 4 * _ALIVE * logits / (1 if name == "gathered" else ranks))


def _of_llama_3(ranks: int, tokens: int = 8192, vocabulary: int = 128_256) -> str:
    gathered, divided = (predict_loss_cost(name, tokens, vocabulary, ranks) for name in LOSS_KINDS)
    return (f"By the same formulas, {vocabulary:,} rows of Llama-3, {tokens:,} tokens, {ranks} "
            f"ranks:\ngathered {gathered.sent / 1e9:.1f} GB sent, {gathered.peak / 1e9:.1f} GB at "
            f"the peak; sharded {divided.sent / 1e6:.2f} MB and {divided.peak / 1e9:.1f} GB")
