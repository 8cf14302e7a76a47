"""A Hugging Face model cut into stages: the embedding is in the first, the head in the last."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labs.training.models import move_to_rank

MicroBatch = dict[str, torch.Tensor]  # "input_ids" and "targets", int64, both (batch, sequence)
IGNORED = -100  # a target that does not count, as in F.cross_entropy
# base_model_prefix of Hugging Face's class -> attributes: layers, last norm, embeddings
_PARTS = {"model": ("layers", "norm", ("embed_tokens",)),
          "transformer": ("h", "ln_f", ("wte", "wpe"))}


class Stage(nn.Module):
    """Consecutive layers of a model, copied out of it; `model` itself stays as it is.

    layers: which ones, counted from 0; there may be none. The first stage takes tokens, int64
    (batch, sequence), each other one hidden states (batch, sequence, hidden). The last one returns
    logits (batch, sequence, vocabulary), each other one hidden states.
    """

    def __init__(self, model: nn.Module, layers: range, is_first: bool, is_last: bool):
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.hidden_size = model.config.hidden_size
        whole, self._prefix = model.base_model, model.base_model_prefix
        self._list, norm, embeddings = _PARTS[self._prefix]
        self._first_layer = layers.start
        left_out = [layer for number, layer in enumerate(getattr(whole, self._list))
                    if number not in layers]
        left_out += [] if is_first else [getattr(whole, name) for name in embeddings]
        left_out += [] if is_last else [getattr(whole, norm)]
        # What deepcopy finds in its memo is not copied: so no rank ever has the whole model twice.
        memo = {id(module): OnOtherStage() for module in left_out}
        self.body = copy.deepcopy(whole, memo)
        kept = [layer for layer in getattr(self.body, self._list)
                if not isinstance(layer, OnOtherStage)]
        setattr(self.body, self._list, nn.ModuleList(kept))
        self.head = copy.deepcopy(model.get_output_embeddings(), memo) if is_last else None
        move_to_rank(self)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """The logits of the last stage, else hidden states."""
        given = {"input_ids" if self.is_first else "inputs_embeds": received}
        hidden = self.body(**given, use_cache=False).last_hidden_state
        if self.is_last:
            return self.head(hidden)
        # GPT-2 returns a view, which torch's split backward cannot detach in place.
        return hidden.clone() if hidden._is_view() else hidden

    def names(self) -> dict[str, str]:
        """Name of each parameter -> its name in the full model. A head that is tied to the
        embedding keeps the name of a head."""
        return {name: self._name_in_model(name) for name, _ in self.named_parameters()}

    def _name_in_model(self, name):
        place, _, rest = name.partition(".")
        if place == "head":
            return f"lm_head.{rest}"
        kind, _, after = rest.partition(".")
        if kind == self._list:
            number, _, after = after.partition(".")
            rest = f"{kind}.{int(number) + self._first_layer}.{after}"
        return f"{self._prefix}.{rest}"


class OnOtherStage(nn.Module):
    """In place of a module that another stage has: hands hidden states on, and adds nothing where
    GPT-2 adds the embedding of positions."""

    def forward(self, given):
        # GPT-2 looks up integer positions and adds the result: 0 for them; hidden states pass as
        # they are. torch.zeros(()) broadcasts.
        return given if given.is_floating_point() else torch.zeros((), device=given.device)


def make_stages(model: nn.Module, layers: Sequence[int],
                numbers: Sequence[int]) -> dict[int, Stage]:
    """number -> stage, of the stages with these numbers. layers: how many layers each of all the
    stages has. Raises ValueError where they are not all the layers of the model."""
    total = len(getattr(model.base_model, _PARTS[model.base_model_prefix][0]))
    if sum(layers) != total or min(layers) < 0:
        raise ValueError(f"stages of {list(layers)} layers are {sum(layers)}; the model has "
                         f"{total}")
    return {number: Stage(model, range(sum(layers[:number]), sum(layers[:number + 1])),
                          number == 0, number == len(layers) - 1) for number in numbers}


def even_layers(layers: int, stages: int) -> list[int]:
    """How many layers each stage has where they are as equal as can be; the first have one more."""
    return [layers // stages + (number < layers % stages) for number in range(stages)]


def count_targets(micro_batches: Sequence[MicroBatch]) -> int:
    """How many targets of all micro-batches count."""
    return sum(int((batch["targets"] != IGNORED).sum()) for batch in micro_batches)


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross-entropies of all targets that count. logits: (batch, sequence,
    vocabulary)."""
    # A sum, not a mean: micro-batches have different numbers of targets that count, so means of
    # them do not add up to the mean over all.
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum",
                           ignore_index=IGNORED)


def whole_step(forward: Callable[[torch.Tensor], torch.Tensor],
               micro_batches: Sequence[MicroBatch]) -> float:
    """Runs forward and backward of a step in one process: the mean loss over all targets of all
    micro-batches, whose gradient adds up in the parameters. forward: tokens -> logits."""
    total, targets = 0.0, count_targets(micro_batches)
    for batch in micro_batches:
        loss = sum_of_losses(forward(batch["input_ids"]), batch["targets"]) / targets
        loss.backward()
        total += loss.item()
    return total


def tied_parameter(stages: Mapping[int, Stage]) -> nn.Parameter | None:
    """Of a rank's stages, the copy of the embedding that is tied to the head: the embedding on the
    first stage, the head on the last; None on other ranks. One rank must not have both."""
    for stage in stages.values():
        if stage.is_first:
            return stage.body.get_input_embeddings().weight
        if stage.is_last:
            return stage.head.weight
    return None


def tied_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of the first and the last rank of a pipeline that all ranks of the job are in;
    elsewhere what torch gives to those outside. All ranks call it."""
    members = dist.get_process_group_ranks(group)
    return dist.new_group([members[0], members[-1]])
