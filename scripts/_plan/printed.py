"""An answer as text, and as JSON."""

import textwrap

from labs.training.memory_categories import GB
from labs.words import counted

WIDTH = 100


def text(question, answers) -> str:
    """The answer for a terminal."""
    lines = [str(question.job)]
    lines += [f"taken: {one}" for one in question.assumed]
    lines += [question.calibration] * bool(question.calibration)
    if not answers:
        return "\n".join([*lines, "", _nothing(question)])
    for number, answer in enumerate(answers, 1):
        lines += ["", f"{number}  {answer.plan}" if len(answers) > 1 else str(answer.plan),
                  *_memory(answer), *_seconds(answer)]
    return "\n".join(line for long in lines for line in _wrapped(long))


def _wrapped(line) -> list[str]:
    indent = " " * 12 if line.startswith("   ") else ""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _nothing(question) -> str:
    given = ", ".join(f"{name} {value}" for name, value in question.settings.items())
    return (f"No plan fits{' with ' + given if given else ''}: take more GPUs, a GPU with more "
            "memory, or a shorter sequence.")


def _memory(answer) -> list[str]:
    stage, most = answer.largest
    low, high = answer.memory_factors.of(most)
    room = answer.job.gpu.usable - answer.overhead
    found = []
    for number, parts in answer.stages.items():
        if len(answer.stages) > 4 and number not in (0, 1, stage, len(answer.stages) - 1):
            continue
        name = "memory" if len(answer.stages) == 1 else f"stage {number}"
        split = ", ".join(f"{part} {size / GB:.3g}" for part, size in parts.items()
                          if size >= 0.005 * GB)
        found.append(f"   {name:8s} {sum(parts.values()) / GB:.1f} GB: {split}")
    fitting = "fits" if answer.is_feasible else "does not fit"
    sure = "" if high <= room else ("; above it within the interval, so try it before you rent"
                                    if answer.is_feasible else "")
    if answer.could_count:
        sure_of = "" if answer.job.shape.is_mixture else " within 10 %"
        found.append(f"            by a closed form{sure_of}; --exact counts every tensor")
    experts = answer.job.shape.experts
    if answer.counted and answer.plan.is_fsdp and 0 < experts < answer.plan.data:
        found.append(f"            FSDP2 shards a tensor with all experts of a layer along its "
                     f"first dimension: {experts} of {answer.plan.data} ranks keep one each, and "
                     f"a gathered layer is padded to {answer.plan.data} experts; fully_shard's "
                     "shard_placement_fn can name another dimension")
    return [*found, f"            {fitting}: {room / GB:.1f} GB of the {answer.job.gpu.name} are "
                    f"free beside CUDA and NCCL{sure}; {_interval(answer.memory_factors)} between "
                    f"{low / GB:.1f} and {high / GB:.1f}"]


def _interval(factors) -> str:
    return f"80 % of {counted(factors.rows, 'run')} ({factors.kind}) lie"


def _seconds(answer) -> list[str]:
    total = answer.seconds.total
    low, high = answer.seconds_factors.of(total)
    causes = ", ".join(f"{name} {value:.3g}" for name, value in answer.causes())
    limit = answer.causes()[0][0]
    rate = (f"   speed    {answer.tokens_per_s:,.0f} tokens/s, "
            f"{answer.tokens_per_s / answer.job.gpus:,.0f} a GPU; MFU {answer.mfu:.0%}; ")
    rate += ("launch-bound: the GPUs wait for their hosts; a larger micro-batch or torch.compile "
             "helps" if answer.is_launch_bound else f"what takes most is {limit}")
    found = [f"   step     {total:.3g} s: {causes}",
             f"            {_interval(answer.seconds_factors)} between {low:.3g} and "
             f"{high:.3g} s", rate]
    if answer.machine:
        found.append(f"   dollars  {answer.dollars_per_step:.3g} a step at "
                     f"{answer.machine.dollars:.2f} a GPU and hour ({answer.machine.name}, "
                     f"{answer.machine.read})")
    line = answer.as_json()["command"]
    if line:
        found.append(f"   command  {line}")
    return found


def as_json(question, answers) -> dict:
    """The same as one object."""
    job = question.job
    return {"model": job.name, "gpus": job.gpus, "gpu": job.gpu.name, "sequence": job.sequence,
            "batch": job.batch, "code": job.code.name, "assumed": list(question.assumed),
            "calibration": question.calibration,
            "answers": [answer.as_json() for answer in answers]}
