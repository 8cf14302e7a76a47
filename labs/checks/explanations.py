"""One way to explain a difference from the reference: known mistakes, each with the numbers that it
leaves, are compared with the numbers that were found.

`explain_parameter` says which mistake leaves a parameter as it is after a step. `explain_outputs`
and `explain_gradients` go further where none does: they look for the first layer whose output
differs in forward, or the first parameter in backward whose gradient does, and say how. These two
are called on all ranks. mistakes.py has the mistakes that several exercises know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import close, largest_difference
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.verdicts import Wrong
from labs.training import models


@dataclass(frozen=True)
class TrainingMistake:
    """A known way to get a training step wrong, told apart by the parameters that it leaves.

    code: see `Wrong`. sentence: continues after "rank 1, parameter 'w' after step 2: it was";
    {parts} is filled in. gives(reference): the parameters by name that the mistake leaves; several
    sets where each number may be from any of them; a parameter that is missing in all of them is
    not explained. hint: said with it; hint_if_all: said instead where every number of the parameter
    is explained so.
    """

    code: str
    sentence: str
    hint: str
    gives: Callable[[Reference], Sequence[Tensors]]
    hint_if_all: str = ""

    def with_hint(self, hint: str, hint_if_all: str = "") -> "TrainingMistake":
        """The same mistake, with what an exercise says to do about it."""
        return replace(self, hint=hint, hint_if_all=hint_if_all)


def explain_parameter(name: str, got: torch.Tensor, wrong: torch.Tensor, reference: Reference,
                      mistakes: Sequence[TrainingMistake],
                      tolerance: float) -> tuple[list[TrainingMistake], bool]:
    """(the mistakes that leave these numbers, whether they explain all numbers, right ones too).

    got: the parameter as it was found. wrong: of its shape, true where it is not the reference's.

    Two mistakes may leave the same: on 2 ranks the mean divided once more is the gradient of one of
    two passes. Then both are named. Those that explain all numbers go before those that explain
    only the wrong ones, and those that say what each number is before a mixture.
    """
    found = []
    for mistake in mistakes:
        # unlike: elements that none of the mistake's sets of parameters explains
        given = [parameters[name] for parameters in mistake.gives(reference) if name in parameters]
        unlike = torch.stack([torch.ones_like(got, dtype=torch.bool),
                              *(differs(got, one, tolerance) for one in given)]).all(0)
        if not (unlike & wrong).any():  # some of what a mistake leaves may happen to be right
            found.append(((bool(unlike.any()), len(given) > 1), mistake))
    # False sorts before True: all numbers before only the wrong ones, one set before several.
    best = min((how for how, _ in found), default=(False, False))
    return [mistake for how, mistake in found if how == best], not best[0]


def differs(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Of their shape: true where they differ by more than the tolerance, which is absolute below 1
    and relative above."""
    # "not close" instead of "far", so that NaN differs too
    return ~((got - want).abs() <= tolerance * want.abs().clamp(min=1.0))


@dataclass(frozen=True)
class Found:
    """An output or a gradient that differs on this rank. total: the sum of it over the group's
    ranks. layer: the reference's module that has this output; None for a gradient."""

    name: str
    got: torch.Tensor
    want: torch.Tensor
    total: torch.Tensor
    ranks: int
    layer: nn.Module | None = None

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the layer, or of the row-parallel layer that ends it."""
        for name in ("", "o_proj", "down_proj"):
            layer = getattr(self.layer, name, None) if name else self.layer
            if isinstance(getattr(layer, "bias", None), torch.Tensor):
                return layer.bias.detach()
        return None


@dataclass(frozen=True)
class LayerMistake:
    """A known way to get a layer's forward or backward wrong, told apart by its output or gradient.

    holds(found): whether it explains what was found. code: see `Wrong`. {ranks} in the sentence is
    filled in.
    """

    code: str
    sentence: str
    hint: str
    holds: Callable[[Found], bool]


def explain_outputs(module: nn.Module, reference: Reference, step: Step, reader,
                    mistakes: Sequence[LayerMistake]) -> Wrong | None:
    """The first output of a layer in forward that differs on a rank, with its cause; None if there
    is none that both models have. The reference goes back to before the step."""
    # Reference.train has updated it already; the module still has the parameters of before.
    reference.model.load_state_dict(reference.before[0])
    wanted, layers = _outputs(reference.model, step), dict(reference.model.named_modules())
    own = _outputs(module, step)
    wanted = {name: _piece_like(_alike(own, name), want, reader.group)
              for name, want in wanted.items()}
    found = {name: value for name, want in wanted.items() for value in [_alike(own, name)]
             if value is not None and value.shape == want.shape}
    return _first_that_differs(found, wanted, list(wanted), reader.group, mistakes,
                    "rank {rank}, in forward: the output of {name!r} is not the reference's; "
                    "{cause}", layers)


def explain_gradients(gradients: Tensors, reference: Reference, reader, number: int,
                      mistakes: Sequence[LayerMistake]) -> Wrong | None:
    """The first gradient in the order of backward that differs on a rank, with its cause."""
    wanted = reference.by_name(reference.mean)
    # Backward reaches the last layers first: of several wrong gradients the one nearest to the loss
    # is the cause, and those before it are consequences.
    names = [name for name in reversed(list(wanted)) if "embed" not in name]
    names += [name for name in wanted if name not in names]  # an embedding's is complete last
    return _first_that_differs(reader.gather(gradients), wanted, names, reader.group, mistakes,
                    f"rank {{rank}}, in backward of step {number}: the gradient of {{name!r}} is "
                    "not the reference's; {cause}")


def _first_that_differs(found, wanted, names, group, mistakes, sentence,
                        layers=None) -> Wrong | None:
    """A sentence on the first of `names` that differs on a rank of the group, of all groups."""
    unlike = [name for name in names if name in found and not close(found[name], wanted[name])]
    by_rank = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, (list(found), unlike), group=group)
    # A name counts if all ranks of the group have it, because its sum is a collective below; it is
    # wrong if it differs on any of them.
    everywhere = set.intersection(*(set(have) for have, _ in by_rank))
    anywhere = {name for _, differing in by_rank for name in differing}
    name = next((name for name in names if name in everywhere & anywhere), None)
    wrong = None
    if name is not None:
        total = found[name].detach().clone()
        dist.all_reduce(total, group=group)
        if name in unlike:
            here = Found(name, found[name], wanted[name], total, len(by_rank),
                         (layers or {}).get(name))
            wrong = _sentence(here, mistakes, sentence)
    # Over all ranks, not over the group: then all groups raise the same sentence.
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return next(filter(None, everyone), None)


def _sentence(here, mistakes, sentence) -> Wrong:
    mistake = next((mistake for mistake in mistakes if mistake.holds(here)), None)
    if mistake:
        said = mistake.sentence.format(ranks=here.ranks)
    else:
        said = f"it is off by up to {largest_difference(here.got, here.want):.2g}"
    return Wrong(sentence.format(rank=dist.get_rank(), name=here.name, cause=said),
                 mistake.hint if mistake else "What comes before it is right.",
                 code=mistake.code if mistake else
                 "wrong_output" if here.layer else "wrong_gradient")


def _outputs(module, step) -> Tensors:
    """Name -> output of each of the module's layers that returns a tensor, in order of completion.
    """
    outputs, hooks = {}, []
    for name, layer in module.named_modules():
        def keep(_, __, output, name=name):
            output = output[0] if isinstance(output, tuple) and output else output
            if isinstance(output, torch.Tensor) and name:
                outputs[name] = models.local_shard(output).detach().clone()

        hooks.append(layer.register_forward_hook(keep))
    # No graph, so that the extra forward leaves no activations and no gradients.
    with torch.no_grad():
        module(**step.inputs())
    for hook in hooks:
        hook.remove()
    return outputs


def _piece_like(found, want, group) -> torch.Tensor:
    """Of the reference's output what `found` is: all, or this rank's piece of the sequence."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if found is None or found.shape == want.shape or want.dim() < 3:
        return want
    pieces = want.chunk(ranks, dim=1)
    return pieces[rank] if len(pieces) == ranks and found.shape == pieces[rank].shape else want


def _alike(outputs, name) -> torch.Tensor | None:
    """The output of the layer of this name; a wrapper may have put parts in front of it."""
    if name in outputs:
        return outputs[name]
    return next((value for other, value in outputs.items() if other.endswith(f".{name}")), None)
