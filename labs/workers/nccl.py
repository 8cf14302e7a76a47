"""NCCL on a rank: how torch's process group is told to treat its errors, and what their words mean.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.{hpp,cpp}, NCCLUtils.cpp and FlightRecorder.hpp
of torch 2.11 to 2.13 (ProcessGroupNCCL.hpp is part of every wheel, below torch/include), and NCCL's
init.cc and socket.cc. Not yet met on a GPU: what a real NCCL does.
"""

import re

# Errors by which NCCL says that another rank has gone: its victims are not to blame. Not
# `ncclSystemError`, though its text speaks of a remote peer, too: a full /dev/shm is one.
_LOST_PEER = re.compile(
    r"remote process exited or there was a network error|ncclRemoteError"
    r"|Connection closed by (remote peer|localRank \d+)"
    r"|NCCL communicator was aborted on rank \d+"  # by the watchdog, after one of the others
    r"|remote error detected from rank")

# What a rank's last words say -> why, as the end of a sentence; the first that is found counts. A
# CUDA error is raised by whatever comes after the kernel that failed, also by NCCL's watchdog.
_LATER = ("Kernels run after the line that launched them: "
          'launch(..., environment={"CUDA_LAUNCH_BLOCKING": "1"}) names the line')
_CAUSES = (
    (r"Duplicate GPU detected",
     ": two ranks use the same GPU, so give tensors device=labs.device() instead of a fixed one"),
    (r"device-side assert triggered",
     f": a kernel's assertion failed, probably at an index out of range. {_LATER}"),
    (r"uncorrectable ECC error|ECC error encountered",
     ": the memory of its GPU is damaged, so use another one (nvidia-smi -q -d ECC)"),
    (r"illegal memory access|unspecified launch failure|misaligned address",
     f": a crash in a kernel. {_LATER}"),
    (r"shared memory segment /dev/shm/nccl",
     ": NCCL found no room in /dev/shm (docker run --shm-size=8g)"),
)


def environment(verify: bool) -> dict[str, str]:
    """Returns the variables of torch's NCCL process group for one rank. verify: whether collectives
    are compared; where they are not, time may be measured."""
    return {
        # SkipCleanUp: after an error the watchdog ends the process. ncclCommAbort, which the other
        # modes call first, can hang itself; the caller tidies up by killing.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # Before that, the watchdog sleeps four times this long for a dump (default: 60 s in all).
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # No dump: it would leave a file for each rank behind, and poll the store every second.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
        # By default its monitor aborts the process after 8 minutes in which the watchdog is stuck;
        # whether ranks hang is for labs.workers.hang_rules to say.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # An event at the start of every collective: only then does the flight recorder tell one
        # that waits for other ranks ("started") from one that waits for this rank's own kernels
        # ("scheduled"). It costs up to 30 % of a small collective: facebookresearch/param PR 203.
        "TORCH_NCCL_ENABLE_TIMING": "1" if verify else "0",
    }


def lost_peer(text: str) -> bool:
    """Whether an error's message, or what a process printed last, says that another rank had gone.
    """
    return bool(_LOST_PEER.search(text))


def cause(text: str) -> str:
    """Returns why a rank failed by its message or its last words, as the end of a sentence; empty
    where they do not tell."""
    return next((why for words, why in _CAUSES if re.search(words, text)), "")
