"""The rates of a node, and of the same node at a laptop's pace."""

from labs.exercises.verdicts import shows
from labs.fsdp.node.paced_run import SlowedNode
from labs.fsdp.node.slowed import HOP
from labs.pictures.tables import Table


@shows("A billion parameters")
def show_pace(node: SlowedNode) -> Table:
    """Returns a table of what the real and the slowed node compute and carry, and of the share that
    communication has of computing on both."""
    real, slow = node.real.card, node.slowed.card
    rates = [("products in 16 bits, GFLOP/s", real.flops, slow.flops),
             ("NVLink, GB/s", real.nvlink, slow.nvlink), ("PCIe, GB/s", real.pcie, slow.pcie),
             ("the card's memory, GB/s", real.bandwidth, slow.bandwidth),
             ("the host's memory, GB/s", node.real.host_bandwidth, node.slowed.host_bandwidth)]
    rows = [(name, f"{usual / 1e9:,.0f}", f"{slowed / 1e9:.3g}", f"{usual / slowed:,.0f}x")
            for name, usual, slowed in rates]
    rows.append(("collectives, for each second of computing",
                 *(f"{ratio:.3f} s" for ratio in node.ratios), ""))
    return Table("A node of A100s, and the same node slowed down",
                 ("", "A100 node", "slowed node", "slower"), rows,
                 note=f"On the slowed node a block's forward takes {1e3 * node.block:g} ms, and "
                      f"each step of a ring {1e3 * HOP:g} ms besides its bytes. The last row: the "
                      "billion-parameter model on 4 A100s, and the laptop's on 4 ranks.")
