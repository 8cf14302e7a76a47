"""The process of one replica group: `python -m ... FOLDER NAME`.

`runs` starts it as a program. A group here has one rank; torchrun would start the ranks of a larger
one with the variables that this file sets.
"""

import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labs.workers.pickling import unpack

if TYPE_CHECKING:
    import torch
    from torchft import Manager

TRAIN = "train"  # a file with the function that trains a group
END = "end"  # a file with the number of the last step, once it is known
PACE = 0.15  # minimum seconds of a step, so that the picture shows single steps
BATCH, CONTEXT = 64, 8  # of each group

_folder = None  # where the caller and its groups find each other's files
_report = None  # the open file in which this group writes down its steps
_began = 0.0


def main(folder: str, name: str) -> None:
    """Runs the function that lies in the folder, and writes down what its steps report."""
    if sys.platform == "linux":  # it ends when the notebook's kernel does, also by kill -9
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torchft makes addresses of it, and not every machine can look up its own name
    socket.gethostname = lambda: "127.0.0.1"
    _train(Path(folder), name)


def _train(folder, name):
    global _folder, _report, _began

    import torch
    import torch.distributed as dist

    from labs.workers import devices

    torch.set_num_threads(1)
    _folder = folder
    # The store of the group's own ranks. torchrun's agent would hold it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0",
                      WORLD_SIZE="1")
    train, args = unpack((folder / TRAIN).read_bytes())
    # A process that replaces a killed one has a file of its own.
    _report = open(folder / f"{name}-{os.getpid()}.steps", "w", buffering=1)
    _write(event="started")
    _began = time.monotonic()
    # The notebook's manager averages over gloo, on every machine.
    with devices.on("cpu"):
        model = train(name, *args)
    values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    _write(event="ended", digest=hashlib.sha256(values).hexdigest())
    _report.close()
    os._exit(0)  # torchft's threads would be waited for


class ReplicaJob:
    """What one replica group trains: a small model, which starts equal in all groups and predicts a
    byte from the 8 before it, and its optimizer. For one group in one process."""

    def __init__(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(),
                                   nn.Linear(32 * CONTEXT, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def state_dict(self) -> dict[str, Any]:
        """The state of model and optimizer, which another group may fetch."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` of another group has returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def should_continue(self, manager: "Manager") -> bool:
        """Whether to take another step: until the replacement has trained with the others for some
        steps. All groups end after the same step."""
        end = _folder / END
        return not end.exists() or manager.current_step() < int(end.read_text())

    def next_batch(self, manager: "Manager") -> "tuple[torch.Tensor, torch.Tensor]":
        """This group's samples of the current step: bytes of a text, (64, 8), and the byte that
        follows each, (64,). They differ from group to group and from step to step."""
        from labs.training import data

        step, group = manager.current_step(), manager.participating_rank() or 0
        windows = data.windows(BATCH, CONTEXT, seed=1000 * step + group)
        return windows[:, :-1], windows[:, -1]

    def record_step(self, manager: "Manager", loss: "torch.Tensor") -> None:
        """Records a step and its loss for the picture. A step lasts at least 0.15 s."""
        global _began

        time.sleep(max(0.0, _began + PACE - time.monotonic()))
        _write(event="step", step=manager.current_step(), groups=manager.num_participants(),
               loss=loss.item(), seconds=time.monotonic() - _began)
        _began = time.monotonic()


def _write(**values):
    _report.write(json.dumps({"time": time.time(), **values}) + "\n")


if __name__ == "__main__":
    # not as `__main__`, which is the notebook's: what it defines is pickled by value
    from labs.surviving_failure import replica_process

    replica_process.main(*sys.argv[1:])
