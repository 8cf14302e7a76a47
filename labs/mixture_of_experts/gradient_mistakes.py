"""Holds the gradients of exercise 9.4 to the reference's, and says over which ranks a wrong one was
summed, and by what it was divided."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from labs.checks.on_ranks import largest_difference
from labs.checks.reference import Tensors
from labs.checks.tolerances import GRADIENTS
from labs.checks.verdicts import Wrong
from labs.checks.waits import WaitTraffic, require_waits
from labs.mixture_of_experts.reference_parallel import Layout, kind_of
from labs.predictions.communication.traffic import passes

UNEXPLAINED = "wrong_gradient"
# The order in which kinds are looked at: faults of the experts first.
_ORDER = ("experts", "shared", "router", "rest")
_CALLED = {"experts": "an expert's parameter", "shared": "the shared expert's parameter",
           "router": "the router's parameter", "rest": "parameter"}


@dataclass
class Probe:
    """What one call of the student's function left on this rank. found: the gradients, those that
    there are. trainable: name -> parameter. moved: parameters that it changed. alone: by rank, the
    full gradients that its share alone gives."""

    layout: Layout
    found: Tensors
    trainable: dict[str, torch.nn.Parameter]
    moved: list[str]
    traffic: WaitTraffic
    alone: list[Tensors] = field(default_factory=list)

    def sums(self, name: str) -> "Sums":
        return Sums(self.layout, dist.get_rank(), [one[name] for one in self.alone],
                    kind_of(name) == "experts")


@dataclass(frozen=True)
class Sums:
    """Sums of one parameter's gradients, as this rank could have them. alone: by rank."""

    layout: Layout
    rank: int
    alone: list[torch.Tensor]
    is_expert: bool

    def local(self, rank: int) -> torch.Tensor:
        """What backward leaves on a rank: of an expert, the sum over its expert group."""
        if not self.is_expert:
            return self.alone[rank]
        return sum(self.layout.shard(self.alone[each], rank)
                   for each in self.layout.expert_group(rank))

    @property
    def own(self) -> torch.Tensor:
        return self.local(self.rank)

    @property
    def over_replicas(self) -> torch.Tensor:
        return sum(map(self.local, self.layout.replica_group(self.rank)))

    @property
    def over_all(self) -> torch.Tensor:
        """The sum over all ranks, of whatever each has: of experts, a mixture of different ones."""
        return sum(map(self.local, range(self.layout.ranks)))

    @property
    def total(self) -> torch.Tensor:
        """The sum of what all ranks' shares give for this rank's part of the parameter."""
        return self.over_replicas if self.is_expert else self.over_all

    @property
    def tolerance(self) -> float:
        """Beside the sum of sizes, because gradients of different ranks may cancel."""
        return GRADIENTS * sum(each.abs().max().item() for each in self.alone) + 1e-9


@dataclass(frozen=True)
class GradientMistake:
    """gives(sums, N, EP, R): the gradients that it leaves. kinds: of which parameters. {n}, {ep}
    and {r} in the sentence are filled in."""

    code: str
    sentence: str
    hint: str
    gives: Callable[[Sums, int, int, int], torch.Tensor]
    kinds: tuple[str, ...] = _ORDER


_EXPERTS, _OTHERS = ("experts",), ("shared", "router", "rest")
_FACTOR = ("All gradients are divided by the same number: that of the ranks whose losses are "
           "averaged, which is all of them.")
_OTHER_EXPERTS = "The ranks that have the same experts are those of `replicas`."
_SUM = "Sum over the ranks first, in every step and for every parameter; then divide."
_REPLICATED = "It is replicated on all ranks, so all of them have a part of its sum."
MISTAKES = (
    GradientMistake(
        "averaged_over_replicas", "averaged over the ranks that have this expert, {r} of {n}: {ep} "
        "times too large",
        "In backward an expert has summed the gradients of tokens from all ranks of its group "
        f"already. {_FACTOR}", lambda sums, n, ep, r: sums.total / r, _EXPERTS),
    GradientMistake(
        "experts_mixed", "averaged over all {n} ranks: those of different experts are mixed",
        _OTHER_EXPERTS, lambda sums, n, ep, r: sums.over_all / n, _EXPERTS),
    GradientMistake(
        "experts_mixed", "summed over all {n} ranks: those of different experts are mixed",
        _OTHER_EXPERTS, lambda sums, n, ep, r: sums.over_all, _EXPERTS),
    GradientMistake(
        "gradient_of_one_rank", "as backward left it: this rank's own",
        "Is every gradient communicated, and is the result in .grad afterwards? An all-reduce of a "
        "copy changes the copy.", lambda sums, n, ep, r: sums.own),
    GradientMistake(
        "sum_not_mean", "summed, and not divided by {n}: {n} times too large", _FACTOR,
        lambda sums, n, ep, r: sums.total),
    GradientMistake(
        "not_summed", "this rank's own, divided by {n}: nothing was summed", _SUM,
        lambda sums, n, ep, r: sums.own / n),
    GradientMistake(
        "not_summed", "this rank's own, divided by {ep}: nothing was summed over its replicas",
        f"{_SUM} {_OTHER_EXPERTS}", lambda sums, n, ep, r: sums.own / ep, _EXPERTS),
    GradientMistake(
        "summed_over_replicas", "summed over {r} ranks only, those of `replicas`, divided by {n}",
        f'{_REPLICATED} Does a test of the name take "shared_experts" for an expert? Names of '
        'experts have ".experts." in them.',
        lambda sums, n, ep, r: sums.over_replicas / n, _OTHERS),
    GradientMistake(
        "summed_over_replicas", "averaged over {r} ranks only, those of `replicas`",
        f"{_REPLICATED} `replicas` are the ranks with the same experts.",
        lambda sums, n, ep, r: sums.over_replicas / r, _OTHERS),
    GradientMistake(
        "mean_twice", "the mean, divided by {n} once more", "Divide once.",
        lambda sums, n, ep, r: sums.total / n ** 2),
    GradientMistake(
        "mean_twice", "the mean, divided by {r} once more", "Divide once.",
        lambda sums, n, ep, r: sums.total / n / r),
    GradientMistake(
        "mean_twice", "the mean, divided by {ep} once more", "Divide once.",
        lambda sums, n, ep, r: sums.total / n / ep),
    GradientMistake(
        "divided_by_replicas", "the sum divided by the number of replicas of an expert, {r}: {ep} "
        "times too large", _FACTOR, lambda sums, n, ep, r: sums.total / r, _OTHERS),
    GradientMistake(
        "divided_by_expert_ranks", "the sum divided by the {ep} ranks that divide the experts: {r} "
        "times too large", _FACTOR, lambda sums, n, ep, r: sums.total / ep),
    GradientMistake(
        "zero_gradient", "zero", "Where did the gradient go?",
        lambda sums, n, ep, r: 0 * sums.total))


def judge_probes(probes: Sequence[Probe], when: str = "") -> float:
    """The largest difference of a gradient. Raises Wrong where one is not the mean over all ranks'
    losses, with the first mistake that explains this parameter in all probes."""
    who = f"rank {dist.get_rank()}, {when}"
    for probe in probes:
        _judge_outside(probe, who)
    worst = 0.0
    for kind in _ORDER:
        for probe in probes:
            for name in probe.trainable:
                if kind_of(name) == kind:
                    sums = probe.sums(name)
                    want = sums.total / probe.layout.ranks
                    far = largest_difference(probe.found[name], want)
                    if not far <= sums.tolerance:  # NaN too
                        raise _named(kind, name, probe, probes, who)
                    worst = max(worst, far)
    for probe in probes:
        require_waits(probe.traffic.never_waited)
        _judge_bytes(probe, who)
    return worst


def _judge_outside(probe, who):
    """What must hold whatever the gradients are."""
    # averaging parameters makes ranks equal too, and trains on wrong gradients
    if probe.moved:
        raise Wrong(f"{who}average_gradients changed parameter {probe.moved[0]!r} itself: its "
                    "numbers, or requires_grad", "Only gradients are changed; the optimizer "
                    "changes parameters.",
                    code="changes_parameters")
    for name in probe.trainable:
        if name not in probe.found:
            raise Wrong(f"{who}parameter {name!r} has no gradient any more",
                        "Write the mean into parameter.grad.", code="gradient_missing")
    # an optimizer would update a frozen parameter that has a gradient, even one of zeros
    for name in probe.found:
        if name not in probe.trainable:
            raise Wrong(f"{who}parameter {name!r} is frozen, and now has a gradient",
                        "Leave parameters without a gradient alone.", code="frozen_parameter")


def _named(kind, name, probe, probes, who) -> Wrong:
    layout = probe.layout
    where = (f"{who}EP × replicas {layout.expert} × {layout.replicas}, {_CALLED[kind]} {name!r}: "
             "the gradient is ")
    # First: what was read before it arrived may be equal to any of the mistakes.
    if probe.traffic.never_waited:
        return Wrong(f"{where}read before it has arrived: nothing waits for the asynchronous "
                     "all-reduce", "The tensor holds the sum after handle.wait().",
                     code="never_waited")
    if not probe.found[name].isfinite().all():
        return Wrong(f"{where}not finite", "Was memory read before it was written?",
                     code="not_finite")
    mistakes = [mistake for mistake in MISTAKES
                if kind in mistake.kinds and _leaves(mistake, probe, name)]
    # In one layout alone several mistakes may leave the same: with EP = 2 and 2 replicas, dividing
    # by either. The one that is right about the other layouts too is named.
    everywhere = [mistake for mistake in mistakes if all(
        _leaves(mistake, other, name) for other in probes if name in other.trainable)]
    for mistake in [*everywhere, *mistakes][:1]:
        said = mistake.sentence.format(n=layout.ranks, ep=layout.expert, r=layout.replicas)
        return Wrong(where + said, mistake.hint, code=mistake.code)
    sums = probe.sums(name)
    want = sums.total / layout.ranks
    if (probe.found[name] - want).norm() < 0.02 * want.norm():
        return Wrong(f"{where}the mean with an error of up to 2 %", "Sum and divide in the "
                     "gradient's own dtype.", code="low_precision")
    ratio = (probe.found[name].norm() / want.norm()).item()
    # What was read before it was written may be so large that its norm overflows.
    if ratio < math.inf and largest_difference(
            probe.found[name], ratio * want) <= ratio * sums.tolerance:
        return Wrong(f"{where}{ratio:.3g} times the reference's", _FACTOR, code="wrong_divisor")
    return Wrong(f"{where}not the reference's, and no multiple of it",
                 "It is neither a sum nor a mean over these ranks.", code=UNEXPLAINED)


def _leaves(mistake, probe, name) -> bool:
    layout, sums = probe.layout, probe.sums(name)
    given = mistake.gives(sums, layout.ranks, layout.expert, layout.replicas)
    # A sum is N times as large as a mean, and so is what rounding does to it.
    return largest_difference(probe.found[name], given) <= layout.ranks * sums.tolerance


def _judge_bytes(probe, who):
    sent = sum(passes(call.kind) * call.bytes for call in probe.traffic.calls) / 2
    due = sum(p.numel() * p.element_size() for p in probe.trainable.values())
    # Catches right numbers at a multiple of the traffic: all gradients gathered on all ranks.
    if sent > 1.1 * due:
        raise Wrong(f"{who}average_gradients communicates {sent / due:.1f} times the bytes of one "
                    "all-reduce of each gradient", "One all-reduce of each gradient is enough.",
                    code="too_much_sent")
