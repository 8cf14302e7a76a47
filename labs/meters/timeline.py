"""Where the time of a step went: spans of computing and of communication, from torch's profiler."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function


@dataclass(frozen=True)
class Span:
    """name of what ran, its category, and begin and end in seconds from the start of the step.

    Categories: forward, backward, optimizer (the phases); compute, communication (what ran in
    them); issued (a collective was called); ready (a parameter's gradient was complete).
    """

    name: str
    category: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on one rank, in order of their begin."""

    spans: tuple

    def of(self, *categories) -> list:
        return [span for span in self.spans if span.category in categories]

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last phase."""
        return max(span.end for span in self.of("forward", "backward", "optimizer"))

    @property
    def communication(self) -> float:
        """Seconds in which at least one collective was under way."""
        return length(union(self.of("communication")))

    @property
    def exposed(self) -> list:
        """(begin, end) of communication during which this rank did not compute. Gaps of less than
        half a millisecond between two operations are Python's, and count as computing."""
        return minus(union(self.of("communication")), union(self.of("compute"), gap=5e-4))

    @property
    def exposed_seconds(self) -> float:
        return length(self.exposed)

    @property
    def shares(self) -> dict:
        """Seconds of the step by phase, with exposed communication taken out of backward."""
        forward, backward, optimizer = (sum(span.seconds for span in self.of(phase))
                                        for phase in ("forward", "backward", "optimizer"))
        return {"forward": forward, "backward": backward - self.exposed_seconds,
                "exposed": self.exposed_seconds, "optimizer": optimizer}


def record(module, optimizer, batch) -> Timeline:
    """Runs one step of the plain loop under the profiler. Recording slows the step down; the
    shape is right, the seconds are not those of an unrecorded step."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        if dist.is_initialized():
            dist.barrier()  # so that the ranks' clocks begin together
        with record_function("labs::forward"):
            loss = module(**batch).loss
        with record_function("labs::backward"):
            loss.backward()
        with record_function("labs::optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return read(recorded.profiler.kineto_results.events())


def mark_gradients(model) -> None:
    """From now on a recorded backward also says when each gradient was complete. To be seen
    before a wrapper's own hooks, the marks must be set before the model is wrapped."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(_mark, name))


def _mark(name, parameter):
    with record_function(f"labs::ready {name}"):
        pass


def read(events) -> Timeline:
    """The timeline in a profiler's raw events; where a GPU worked, its kernels are the computing
    and the communication, not the calls that launched them."""
    on_gpu = any(event.device_type() == DeviceType.CUDA for event in events)
    spans = [(event, category) for event in events
             if (category := _category(event.name(), event.device_type(), on_gpu))]
    start = min(event.start_ns() for event, category in spans if category == "forward")
    spans = [(event, category) for event, category in spans if event.start_ns() >= start]
    return Timeline(tuple(sorted(
        (Span(event.name().removeprefix("labs::ready ").removeprefix("labs::"), category,
              (event.start_ns() - start) / 1e9,
              (event.start_ns() + event.duration_ns() - start) / 1e9)
         for event, category in spans), key=lambda span: span.begin)))


def _category(name, device, on_gpu):
    if name.startswith("labs::"):
        return name.removeprefix("labs::").split()[0]
    if name.startswith("c10d::"):
        return "issued"
    if on_gpu and device != DeviceType.CUDA:
        return None
    if name.startswith(("gloo:", "nccl")):
        return "communication"
    return "compute" if on_gpu or name.startswith("aten::") else None


def union(spans, gap: float = 0.0) -> list:
    """Disjoint (begin, end) stretches that the spans cover, in order; gaps of up to `gap` seconds
    are closed."""
    stretches = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if stretches and begin <= stretches[-1][1] + gap:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((begin, end))
    return stretches


def minus(stretches, others) -> list:
    """What is left of disjoint stretches where none of the disjoint `others` lies over them."""
    left = []
    for begin, end in stretches:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def length(stretches) -> float:
    """Seconds that disjoint stretches last."""
    return sum(end - begin for begin, end in stretches)
