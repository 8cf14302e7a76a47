"""What exercise 4.11's formulas say of the billion-parameter lab's jobs."""

from collections.abc import Callable

from labs.exercises.numbers import require_number, require_numbers
from labs.exercises.verdicts import shows
from labs.pictures.tables import Table

# The data sheets' rates of an A100: TF32's FLOP/s, and bytes/s of NVLink and of PCIe 4, each in one
# direction; bytes/s of the memory of the two EPYC sockets of its node.
TF32, NVLINK, PCIE, HOST = 156e12, 300e9, 32e9, 410e9
TOKENS = 4096  # of a rank
ONE_GPU, EIGHT_GPUS = (1, TOKENS, 0.361), (8, 8 * TOKENS, 0.380)  # GPUs, tokens, seconds of a step


@shows("4.11")
def show_scaling_costs(efficiency: Callable, communication_ratio: Callable,
                       offload: Callable) -> Table:
    """Returns a table of the student's three prices, for models of 1.01 and 5.44 billion
    parameters on 8 A100s."""
    left = require_number(efficiency(ONE_GPU, EIGHT_GPUS), "efficiency")
    ratio = require_number(communication_ratio(1.01e9, 8, TOKENS, flops=TF32, link=NVLINK),
                           "communication_ratio")
    copies, adamw = require_numbers(offload(5.44e9, 8, pcie=PCIE, host=HOST),
                                    ("copies", "AdamW"), "offload")
    rows = [("tokens/s of a GPU that are left on 8", f"{left:.1%}"),
            ("FSDP's communication, for each second of computing", f"{ratio:.3f} s"),
            ("CPU offload of the larger model: copies over PCIe", f"{copies:.3f} s"),
            ("… and AdamW on the host", f"{adamw:.3f} s")]
    return Table("Your prices, at the data sheets' rates of an A100 and its host", ("", ""), rows)
