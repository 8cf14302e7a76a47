"""Exercise 2.10: torch's DDP with the student's cap, communication over computing, and its
overlapped share."""

from torch.nn.parallel import DistributedDataParallel

from labs.checks.generator import new_generator
from labs.checks.numbers import Cause, judge_number, require_numbers, require_signature
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.manual_ddp.api_hints import API_HINTS
from labs.pictures import phases
from labs.training.models import EdgeCaseModel
from labs.workers import devices

CAPS = (800_000, 3 * 2**20)  # bytes; the first one is no whole number of MiB
_EXPOSED = "Exposed communication is no computing: subtract it from the phases' sum."


@check("2.10", hints=API_HINTS)
def check_measurement(torch_ddp, communication_shares):
    """torch_ddp(model, cap_bytes) is torch's DDP around the model with that cap;
    communication_shares(communication, phases) is all communication over computing, and the share
    of communication that is overlapped."""
    require_signature(communication_shares, ("communication", "phases"))
    on_ranks(_wrap, torch_ddp, world_sizes=(2,))
    rng = new_generator()
    for _ in range(3):
        seconds = {name: rng.uniform(0.05, 0.5)
                   for name in ("forward", "backward", "exposed", "optimizer")}
        # A part of it is overlapped, so it is more than what is exposed.
        communication = seconds["exposed"] + rng.uniform(0.05, 0.5)
        ratio, overlapped = require_numbers(
            communication_shares(communication, dict(seconds)),
            ("communication / computing", "the overlapped share"), "communication_shares")
        want, hidden = phases.communication_shares(communication, seconds)
        judge_number(ratio, want, _causes(communication, seconds), "communication / computing",
                     hint=_EXPOSED)
        judge_number(overlapped, hidden, _overlap_causes(communication, seconds),
                     "the overlapped share", hint="What is not exposed is overlapped.")
    return ("torch's DDP has your cap; the ratio counts all communication and computing alone, and "
            "the share what is overlapped")


def _wrap(torch_ddp):
    """On a rank."""
    for cap in CAPS:
        model = EdgeCaseModel(seed=0).to(devices.device())
        raise_on_all_ranks(_judge_wrapped, torch_ddp(model, cap), model, cap)


def _judge_wrapped(module, model, cap):
    # the student's own module would train, too: compared with itself it teaches nothing
    if not isinstance(module, DistributedDataParallel):
        raise Wrong(f"torch_ddp returned {kind_of(module)}, not a DistributedDataParallel",
                    "Return DistributedDataParallel(model, bucket_cap_mb=...).", code="wrong_type")
    if module.module is not model:
        raise Wrong("the DistributedDataParallel is around another model",
                    "Wrap the model that torch_ddp gets.", code="other_model")
    # bytes taken for MiB make one bucket of all gradients; without a cap torch takes 25 MiB
    if abs(module.bucket_bytes_cap - cap) > 1:  # torch rounds the product down
        raise Wrong(f"for cap_bytes={cap:,} DDP's buckets have up to {module.bucket_bytes_cap:,} "
                    "bytes", "bucket_cap_mb is in MiB, 2**20 bytes, and may be a fraction.",
                    code="wrong_bucket_cap")


def _causes(communication, seconds) -> list[Cause]:
    step, exposed = sum(seconds.values()), seconds["exposed"]
    computing = step - exposed
    return [
        Cause("exposed_alone", exposed / computing, "only exposed communication is counted",
              "Overlapped communication counts, too: `communication` has all of it."),
        Cause("exposed_is_no_computing", communication / step,
              "the step's seconds include exposed communication", _EXPOSED),
        Cause("overlap_subtracted", communication / (step - communication),
              "all communication is subtracted from the step",
              "While communication is overlapped the rank computes: subtract the exposed part."),
        Cause("exposed_is_no_computing", communication / (step + exposed),
              "exposed communication is added to the step", _EXPOSED),
        Cause("inverted", computing / communication, "that is computing / communication",
              "Divide communication by computing."),
        Cause("phase_missing", communication / (computing - seconds["optimizer"]),
              "the optimizer's seconds are missing", "A rank computes in the optimizer, too."),
        Cause("phase_missing", communication / (computing - seconds["forward"]),
              "forward's seconds are missing", "A rank computes in forward, too."),
        Cause("phase_missing", communication / seconds["backward"],
              "only backward is counted as computing",
              "A rank computes in forward and in the optimizer, too.")]


def _overlap_causes(communication, seconds) -> list[Cause]:
    exposed = seconds["exposed"]
    return [
        Cause("exposed_share", exposed / communication, "that is the exposed share",
              "Overlapped is what is not exposed."),
        Cause("seconds_not_share", communication - exposed, "these are seconds",
              "Divide by all communication."),
        Cause("share_of_computing", (communication - exposed) / (sum(seconds.values()) - exposed),
              "that is a share of computing", "Divide by all communication."),
        Cause("share_of_step", (communication - exposed) / sum(seconds.values()),
              "that is a share of the step", "Divide by all communication.")]
