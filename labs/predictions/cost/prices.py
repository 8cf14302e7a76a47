"""What GPUs cost to rent: prices of offers that can be rented, each with the seller's page, the day
it was read, and who read it.

Nobody here can rent for you, and prices change within weeks: look yours up, and lay it over the
table (`price_table`). None was read here from a seller's page: public repositories transcribed
them, and `transcribed` names which. Left out are prices without a page and a day, sums of the
prices of parts (Google's a3-highgpu-1g is sold on spot only, and its on-demand price is such a sum)
and spot prices without a day, as those of A100.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from labs.predictions import hardware


@dataclass(frozen=True)
class Machine:
    """A machine to rent. gpu: a name in `hardware.GPUS`. gpus: on the machine. dollars: per GPU and
    hour, on demand; spot: the seller's own price where it may take the machine back, None where no
    such price was found. source: the seller's page; read: the day, as 2026-09-20; transcribed: the
    public page that copied it from there, "" where you read it yourself."""

    name: str
    gpu: str
    gpus: int
    dollars: float
    source: str
    read: str
    transcribed: str = ""
    spot: float | None = None


_LAMBDA = "lambda.ai/instances", "2026-09-20", "github.com/api-evangelist/lambda-labs"
_RECEIPTS = "github.com/datareceipts/data-receipts, 109-gpu-pricing"
_RUNPOD = "runpod.io/pricing", "2026-11-09", _RECEIPTS
_AWS = "aws.amazon.com/ec2/pricing, us-east-1", "2026-11-09", _RECEIPTS
# What `dstack offer` printed of AWS's price list and of its spot prices, in one region, on one day.
_P5EN = ("aws.amazon.com/ec2/pricing, us-east-1", "2026-08-06",
         "github.com/dstackai/dstack/pull/4110")

MACHINES = {machine.name: machine for machine in (
    Machine("Lambda 1x A10", "A10", 1, 1.29, *_LAMBDA),
    Machine("Lambda 8x A100-40", "A100-40", 8, 1.99, *_LAMBDA),
    Machine("Lambda 8x A100-80", "A100-80", 8, 2.79, *_LAMBDA),
    Machine("Lambda 8x H100", "H100", 8, 3.99, *_LAMBDA),
    Machine("RunPod Community A100-80", "A100-80", 1, 1.39, *_RUNPOD),
    Machine("RunPod Secure A100-80", "A100-80", 1, 1.79, *_RUNPOD),
    Machine("RunPod Community H100", "H100", 1, 2.69, *_RUNPOD),
    Machine("RunPod Secure H100", "H100", 1, 3.99, *_RUNPOD),
    Machine("AWS p4d.24xlarge", "A100-40", 8, 2.7447, *_AWS),
    Machine("AWS p4de.24xlarge", "A100-80", 8, 3.4309, *_AWS),
    Machine("AWS p5.48xlarge", "H100", 8, 6.88, *_AWS),
    Machine("AWS p5en.48xlarge", "H200", 8, 7.912, *_P5EN, spot=3.40),
)}
"""Name -> machine. p5en.48xlarge is the one offer whose on-demand and spot price were both read on
one day: 63.296 and 27.1988 dollars an hour for its 8 GPUs."""

NODE = "Lambda 8x A100-80"  # what preflight predicts the notebooks' dollars on


def price_table(own: Mapping[str, Mapping | float] | str | Path | None = None
                ) -> dict[str, Machine]:
    """Returns MACHINES with `own` laid over them: name -> fields of a `Machine`, or -> its dollars
    per GPU and hour alone; or the path of a JSON file of the same. A name that is not in the table
    is a new machine, which needs a gpu and dollars; it has one GPU if it says nothing else.

    Raises ValueError, in one sentence, where a row cannot be read.
    """
    if isinstance(own, str | Path):
        own = json.loads(Path(own).read_text(encoding="utf-8"))
    return MACHINES | {name: _own(name, given) for name, given in (own or {}).items()}


def _own(name, given) -> Machine:
    fields = {"dollars": given} if isinstance(given, int | float) else dict(given)
    known = MACHINES.get(name)
    if not known and {"gpu", "dollars"} - set(fields):
        raise ValueError(f"{name!r} is not in the table of prices: give its gpu and its dollars")
    base = known or Machine(name, fields["gpu"], 1, fields["dollars"], "", "")
    try:
        machine = replace(base, **{"source": "your own", "read": "", "transcribed": "", **fields})
    except TypeError:
        raise ValueError(f"{name!r} has a field that no machine has: choose "
                         f"{', '.join(vars(base))}") from None
    hardware.gpu(machine.gpu)
    prices = [machine.gpus, machine.dollars, *([] if machine.spot is None else [machine.spot])]
    if not all(isinstance(value, int | float) and value > 0 for value in prices):
        raise ValueError(f"{name!r}: gpus and prices are numbers above 0")
    return machine


def hourly(machine: Machine) -> float:
    """Dollars per hour of the whole machine, on demand."""
    return machine.gpus * machine.dollars


def node_dollars(minutes: float, name: str = NODE) -> float:
    """Dollars for `minutes` of the machine with this name, at its list price on demand."""
    return minutes / 60 * hourly(MACHINES[name])
