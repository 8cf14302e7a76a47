"""What the check of exercise 7.5 must reject of a Llama with a divided vocabulary, with the words
that must say why; and what it must accept."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from answers import judge_all
from torch import nn
from vocabulary_answers import (
    ByHand,
    Embedding,
    gathered,
    own_rows,
    right,
    size_and_rank,
    summed,
)

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["vocabulary_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# wrong ones

always = object()  # ties what was not tied


def replace_all(model, group, head=None, enter=True, tie=True, loss=None, embedding=None):
    """The right answer in pieces that a wrong one replaces."""
    whole, columns = model.get_input_embeddings(), model.get_output_embeddings()
    tied = whole.weight is columns.weight
    rows = (embedding or Embedding)(whole, group)
    part = (head or right.column_shard)(columns, group)
    if tie is always or tied and tie:
        part.weight = rows.weight
    if enter:
        lab.map_input(part, lambda hidden: right.CopyToRegion.apply(hidden, group))
    model.set_input_embeddings(rows)
    model.set_output_embeddings(part)
    loss = loss or right.vocabulary_parallel_cross_entropy
    lab.set_loss(model, lambda logits, targets: loss(logits, targets, group))


class Llama:
    def nothing(model, group):
        pass

    def embedding_only(model, group):
        model.set_input_embeddings(Embedding(model.get_input_embeddings(), group))
        if model.config.tie_word_embeddings:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight

    def loss_not_replaced(model, group):
        loss = model.loss_function
        replace_all(model, group)
        model.loss_function = loss

    def logits_gathered(model, group):
        def loss(logits, targets, group):
            return F.cross_entropy(gathered(logits, group).flatten(0, -2), targets.flatten())

        replace_all(model, group, loss=loss)

    def not_entered(model, group):
        """No f before the head."""
        replace_all(model, group, enter=False)

    def entered_twice(model, group):
        replace_all(model, group)
        lab.map_input(model.get_output_embeddings(),
                      lambda hidden: right.CopyToRegion.apply(hidden, group))

    def untied(model, group):
        replace_all(model, group, tie=False)

    def always_tied(model, group):
        replace_all(model, group, tie=always)

    def head_whole(model, group):
        """Every rank computes all logits, and the loss of its part of them."""
        ranks, rank = size_and_rank(group)
        model.set_input_embeddings(Embedding(model.get_input_embeddings(), group))
        if model.config.tie_word_embeddings:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        lab.set_loss(model, lambda logits, targets: right.vocabulary_parallel_cross_entropy(
            logits.chunk(ranks, -1)[rank], targets, group))

    def tied_reduced_once_too_often(model, group):
        replace_all(model, group)
        if model.config.tie_word_embeddings:
            model.get_input_embeddings().weight.register_hook(
                lambda gradient: funcol.all_reduce(gradient, "sum", group))

    def embeddings_averaged(model, group):
        """As DDP would: the gradients of the shards are averaged over the ranks."""
        replace_all(model, group)
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight.register_hook(lambda gradient: funcol.all_reduce(gradient, "avg", group)
                                      if dist.get_backend() == "nccl" else funcol.all_reduce(
                                          gradient, "sum", group) / dist.get_world_size(group))

    def head_is_a_view(model, group):
        def view(head, group):
            ranks, rank = size_and_rank(group)
            part = nn.Linear(*head.weight.shape, bias=False, device="meta")
            part.weight = nn.Parameter(head.weight.detach().chunk(ranks)[rank])
            return part

        replace_all(model, group, head=view)

    def whole_kept(model, group):
        """Both whole weights are in a closure."""
        whole = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        replace_all(model, group)
        model.whole = lambda: whole

    def labels_not_shifted(model, group):
        replace_all(model, group)
        model.loss_function = lambda logits, labels, **_: right.vocabulary_parallel_cross_entropy(
            logits, labels, group)

    def scale_on_one_rank(model, group):
        replace_all(model, group)
        if dist.get_rank(group) == 1:
            model.get_output_embeddings().register_forward_hook(lambda *found: found[-1] / 4)

    def over_the_world(model, group):
        replace_all(model, group, loss=lambda logits, targets, _: (
            right.vocabulary_parallel_cross_entropy(logits, targets, dist.group.WORLD)))

    def rows_in_another_order(model, group):
        def other_rows(head, group):
            part = right.column_shard(head, group)
            ranks, rank = size_and_rank(group)
            part.weight = nn.Parameter(head.weight.detach().chunk(ranks)[rank - 1].clone())
            return part

        replace_all(model, group, head=other_rows)


WRONG_LLAMAS = [
    (Llama.nothing, "parameter_memory_too_high"),
    (Llama.embedding_only, "parameter_memory_too_high"),
    (Llama.loss_not_replaced, "own_loss_kept"),
    (Llama.logits_gathered, "wrong_traffic"),
    (Llama.not_entered, "gradient_not_summed"),
    (Llama.entered_twice, "summed_too_often times"),
    (Llama.untied, "tie_lost"),
    (Llama.always_tied, "tied_wrongly"),
    (Llama.head_whole, "gradient_not_summed 'lm_head.weight'"),
    (Llama.tied_reduced_once_too_often, "summed_too_often"),
    (Llama.embeddings_averaged, "summed_too_often"),
    (Llama.head_is_a_view, "parameter_memory_too_high"),
    (Llama.whole_kept, "memory_too_high"),
    (Llama.labels_not_shifted, "wrong_loss"),
    (Llama.scale_on_one_rank, "wrong_loss"),
    (Llama.rows_in_another_order, "wrong_part"),
]


# right ones written differently


def with_hooks(model, group):
    """The modules stay; weights are cut in place, and hooks do the rest."""
    ranks, rank = size_and_rank(group)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    rows = embedding.num_embeddings // ranks
    first = rows * rank
    embedding.weight = nn.Parameter(embedding.weight.detach()[first:first + rows].clone())
    head.weight = embedding.weight if tied else nn.Parameter(
        head.weight.detach()[first:first + rows].clone())
    embedding.forward = lambda tokens: own_rows(SimpleNamespace(
        first=first, weight=embedding.weight, padding_idx=None), tokens)
    embedding.register_forward_hook(lambda _, __, found: summed(found, group))
    head.register_forward_pre_hook(
        lambda _, given: (right.CopyToRegion.apply(given[0], group),))
    model.loss_function = lambda logits, labels, **_: ByHand.apply(
        logits[:, :-1], labels[:, 1:], group)


def with_f_after_the_norm(model, group):
    """The head's input is copied where the last norm ends."""
    replace_all(model, group, enter=False)
    model.model.norm.register_forward_hook(
        lambda _, __, found: right.CopyToRegion.apply(found, group))


RIGHT_LLAMAS = [right.vocabulary_parallel, with_hooks, with_f_after_the_norm]


def with_the_loss(answer):
    """Both arguments of the check."""
    return right.vocabulary_parallel_cross_entropy, answer


@pytest.mark.slow
def test_llamas():
    """Wrong ones are rejected, right ones accepted, in one launch."""
    wrong = [(with_the_loss(answer), words) for answer, words in WRONG_LLAMAS]
    judge_all(lab.check_vocabulary_parallel, wrong, map(with_the_loss, RIGHT_LLAMAS), ranks=2)


@pytest.mark.slow
def test_a_loss_on_all_ranks_is_rejected():
    """Only where the group is not all ranks."""
    wrong = with_the_loss(Llama.over_the_world), "wrong_loss group"
    judge_all(lab.check_vocabulary_parallel, [wrong], [], ranks=4)
