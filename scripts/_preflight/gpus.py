"""The GPUs: what they are, who uses them, and how they reach each other."""

from collections import Counter

from _unattended import nvidia_smi
from _unattended.nvidia_smi import number

from _preflight.found import NOTE, STOP, Found, none, ok, worst

MiB = 2**20
USED = 500  # MiB that something else may hold before it is said
# Bits of clocks_event_reasons.active that mean a slow GPU. Source: nvml.h,
# nvmlClocksEventReasonHwSlowdown and the following.
_SLOW = {0x8: "hardware slowdown", 0x20: "too warm (software)", 0x40: "too warm (hardware)",
         0x80: "too little power"}
_LINKS = {"NV": "NVLink", "PIX": "PCIe switch", "PXB": "PCIe switches", "PHB": "the host's PCIe",
          "NODE": "the host's PCIe", "SYS": "between the host's sockets"}
_THROUGH_THE_HOST = ("PHB", "NODE", "SYS")


def cards() -> Found:
    """Names, memory, modes, errors of memory, and whether they are slowed down."""
    if not nvidia_smi.is_there():
        return none("none: ranks run on the CPU with gloo; the notebooks say what that shows")
    asked = nvidia_smi.query("index", "name", "memory.total", "memory.free", "compute_mode",
                             "mig.mode.current", "ecc.errors.uncorrected.volatile.total",
                             "clocks_event_reasons.active", "temperature.gpu")
    if "clocks_event_reasons.active" not in asked:  # its name before driver 535
        asked |= nvidia_smi.query("clocks_throttle_reasons.active")
    if not asked.get("index"):
        return worst("nvidia-smi lists no GPU", [(STOP, "The driver is there and sees no GPU: "
                                                        "start the container with --gpus all.")])
    kinds = Counter(zip(asked["name"], asked["memory.total"], strict=True))
    value = ", ".join(f"{count} x {name}, {float(total) * MiB / 1e9:.1f} GB"
                      for (name, total), count in kinds.items())
    problems = [*_modes(asked), *_errors(asked), *_throttled(asked), *_mixed(kinds)]
    return worst(value, problems, **asked)


def _modes(asked):
    for index, mode in zip(asked["index"], asked.get("compute_mode", []), strict=False):
        if mode == "Prohibited":
            yield STOP, f"GPU {index} is closed to programs: sudo nvidia-smi -i {index} -c 0."
        elif mode == "Exclusive_Process" and len(asked["index"]) == 1:
            yield STOP, ("GPU 0 takes one process only, and here ranks share it: "
                         "sudo nvidia-smi -i 0 -c 0.")
    if "Enabled" in asked.get("mig.mode.current", []):
        yield NOTE, "MIG divides a GPU: predictions take the memory of the part that torch sees."


def _errors(asked):
    column = asked.get("ecc.errors.uncorrected.volatile.total", [])
    for index, cell in zip(asked["index"], column, strict=False):
        if number(cell):
            yield NOTE, (f"GPU {index} has {cell} memory errors that could not be corrected since "
                         "it was started: rent another machine.")


def _throttled(asked):
    column = asked.get("clocks_event_reasons.active", asked.get("clocks_throttle_reasons.active"))
    for index, cell in zip(asked["index"], column or [], strict=False):
        bits = int(cell, 16) if cell.startswith("0x") else 0
        reasons = [why for bit, why in _SLOW.items() if bits & bit]
        if reasons:
            yield NOTE, (f"GPU {index} is slowed down ({', '.join(reasons)}): its rank holds up "
                         "all others.")


def _mixed(kinds):
    if len(kinds) > 1:
        yield NOTE, "The GPUs differ: presets and predictions take GPU 0 for all."


def users() -> Found:
    """Which programs hold memory of the GPUs."""
    if not nvidia_smi.is_there():
        return none("no GPU")
    used = nvidia_smi.query("index", "memory.used")
    programs = nvidia_smi.query("pid", "used_memory", "process_name", of="compute-apps")
    named = [f"{name} ({pid}) {held} MiB" for pid, held, name in
             zip(*programs.values(), strict=True)] if programs else []
    busy = {index: float(held) for index, held in zip(*used.values(), strict=True)
            if (number(held) or 0) > USED} if used else {}
    if not busy and not named:
        return ok("free", used=used.get("memory.used"))
    value = ", ".join(named) or "held by no program that can be seen here"
    advice = ("Others' programs take memory that presets count on, and hold up ranks: end them "
              f"({', '.join(f'GPU {index}: {held:.0f} MiB' for index, held in busy.items())}).")
    return worst(value, [(NOTE, advice)] if busy else [], used=used.get("memory.used"))


def links() -> Found:
    """How each pair of GPUs is connected, and whether each reaches the other's memory."""
    if not nvidia_smi.is_there():
        return none("no GPU")
    table = topology(nvidia_smi.run("topo", "-m").stdout)
    if len(table) < 2:
        return ok("one GPU", matrix=table)
    pairs = Counter(table[a][b] for a in range(len(table)) for b in range(a))
    value = ", ".join(f"{count} {'pair' if count == 1 else 'pairs'} by {_described(kind)}"
                      for kind, count in pairs.most_common())
    problems = [*_one_way(len(table))]
    if any(kind in _THROUGH_THE_HOST for kind in pairs):
        problems.append((NOTE, "Some pairs go through the host: DDP and FSDP work, communication "
                               "takes several times as long as on NVLink."))
    return worst(value, problems, matrix=table)


def _described(kind) -> str:
    words = next((words for begin, words in _LINKS.items() if kind.startswith(begin)), kind)
    return f"{words} ({kind})"


def topology(printed: str) -> list[list[str]]:
    """The matrix of `nvidia-smi topo -m`: [GPU][GPU] -> "NV12", "PHB", ...; "X" of itself."""
    lines = [line.split() for line in printed.splitlines()]
    rows = [cells for cells in lines if cells and cells[0].startswith("GPU")
            and len(cells) > 1 and not cells[1].endswith("GPU1") and "X" in cells]
    return [row[1:1 + len(rows)] for row in rows]


def _one_way(count):
    """Pairs of which one GPU does not reach the other's memory: NCCL then goes through the host's.
    """
    from labs.workers import cuda

    for a in range(count):
        for b in range(a):
            there, back = cuda.can_access_peer(a, b), cuda.can_access_peer(b, a)
            if there != back:
                yield NOTE, (f"GPU {a if there else b} reaches the memory of GPU "
                             f"{b if there else a}, but not the other way round: if ranks hang, "
                             "set NCCL_P2P_DISABLE=1.")
