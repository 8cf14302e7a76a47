"""Says why a loss or a parameter differs from the reference's: finds the first layer whose output
differs in forward, or the first parameter in backward whose gradient does, and compares it with
what each known mistake leaves. Called on all ranks, after a check has found a difference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import close, largest_difference
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.verdicts import Wrong
from labs.training import models


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
class Cause:
    """A known mistake in a layer's forward or backward. holds(found): whether it explains what was
    found. code: see `Wrong`."""

    code: str
    sentence: str
    hint: str
    holds: Callable[[Found], bool]


def _bias_times(found: Found, times: int) -> bool:
    return found.bias is not None and close(found.got - found.want,
                                            (times * found.bias).expand_as(found.want))


def _is_part(found: Found) -> bool:
    """Whether the ranks' outputs add up to the reference's, the bias left out or on every rank."""
    surplus = [0] if found.bias is None else [n * found.bias for n in (0, -1, found.ranks - 1)]
    return any(close(found.total, found.want + bias) for bias in surplus)


_SCALED = (
    Cause("summed_too_often", "it is {ranks} times the reference's",
          "Sum over the ranks only what each rank has a part of, and only once.",
          lambda found: close(found.got, found.ranks * found.want)),
    Cause("averaged", "it is 1/{ranks} of the reference's",
          "Nothing is averaged here: all ranks have the same batch, and parts are summed.",
          lambda found: close(found.got * found.ranks, found.want)),
    Cause("not_finite", "it is not finite", "Was memory read before it was written?",
          lambda found: not found.got.isfinite().all()))
OUTPUT_CAUSES = (
    Cause("bias_on_every_rank", "the bias is in it {ranks} times, once for each rank",
          "A row-parallel layer adds its bias after the sum over the ranks, once.",
          lambda found: _bias_times(found, found.ranks - 1)),
    Cause("bias_missing", "the bias is missing", "Add the bias after the sum over the ranks.",
          lambda found: _bias_times(found, -1)), *_SCALED,
    Cause("not_summed", "it is only this rank's part: those of all ranks add up to the reference's",
          "The outputs of a row-parallel layer are summed over the ranks: g, ReduceFromRegion.",
          _is_part))
GRADIENT_CAUSES = (
    *_SCALED,  # first: 1/t of it on every rank also adds up
    Cause("gradient_not_summed",
          "the gradient is only this rank's part: those of all ranks add up to the reference's",
          "Each rank's column-parallel layers send back only their part of the gradient of their "
          "input. Sum it over the ranks where the input enters: f, CopyToRegion.",
          lambda found: close(found.total, found.want)),
    # Of a sharded parameter all ranks are asked for the same gradient, put together.
    Cause("gradient_partly_summed",
          "each rank has another gradient for this parameter: a part of it was summed over the "
          "ranks, and a part is this rank's alone",
          "Several layers take this input, as query, key and value do, or gate and up: one of them "
          "sends its part back unsummed. Apply f once, where the input of all of them enters.",
          lambda found: not close(found.total, found.ranks * found.got)))


def explain_outputs(module: nn.Module, reference: Reference, step: Step, reader,
                    causes: Sequence[Cause]) -> Wrong | None:
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
    return _explain(found, wanted, list(wanted), reader.group, causes,
                    "rank {rank}, in forward: the output of {name!r} is not the reference's; "
                    "{cause}", layers)


def explain_gradients(gradients: Tensors, reference: Reference, reader, number: int,
                      causes: Sequence[Cause]) -> Wrong | None:
    """The first gradient in the order of backward that differs on a rank, with its cause."""
    wanted = reference.by_name(reference.mean)
    # Backward reaches the last layers first: of several wrong gradients the one nearest to the loss
    # is the cause, and those before it are consequences.
    names = [name for name in reversed(list(wanted)) if "embed" not in name]
    names += [name for name in wanted if name not in names]  # an embedding's is complete last
    return _explain(reader.gather(gradients), wanted, names, reader.group, causes,
                    f"rank {{rank}}, in backward of step {number}: the gradient of {{name!r}} is "
                    "not the reference's; {cause}")


def _explain(found, wanted, names, group, causes, sentence, layers=None) -> Wrong | None:
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
            wrong = _sentence(here, causes, sentence)
    # Over all ranks, not over the group: then all groups raise the same sentence.
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return next(filter(None, everyone), None)


def _sentence(here, causes, sentence) -> Wrong:
    cause = next((cause for cause in causes if cause.holds(here)), None)
    if cause:
        said = cause.sentence.format(ranks=here.ranks)
    else:
        said = f"it is off by up to {largest_difference(here.got, here.want):.2g}"
    return Wrong(sentence.format(rank=dist.get_rank(), name=here.name, cause=said),
                 cause.hint if cause else "What comes before it is right.",
                 code=cause.code if cause else "wrong_output" if here.layer else "wrong_gradient")


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
