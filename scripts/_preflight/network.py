"""Ports on this machine, and who listens on them."""

import os
import socket
import time

import psutil

from _preflight.found import Found, note, ok, stop

_LOOPBACK = ("127.", "::1", "::ffff:127.")
_SLOW = 2.0  # seconds for this host's own name


def ports() -> Found:
    """Whether ranks can meet on a port of this machine."""
    began = time.monotonic()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as one:
                other, _ = server.accept()
                other.sendall(b"hello")
                one.settimeout(5)
                arrived = one.recv(5)
                other.close()
    except OSError as error:
        return stop(f"127.0.0.1: {error}", "Ranks meet on a port of this machine: bring the "
                                           "loopback interface up (ip link set lo up).")
    if arrived != b"hello":
        return stop("127.0.0.1 answers something else", "Something redirects local connections: "
                                                        "look at the firewall's rules.")
    seconds = time.monotonic() - began
    return _name_found(f"127.0.0.1:{port} connects in {1e3 * seconds:.0f} ms")


def _name_found(value) -> Found:
    """torch asks for this host's own name when ranks meet."""
    name, began = socket.gethostname(), time.monotonic()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return note(value, f"Nobody knows the address of this host's own name, {name}: add it to "
                           "/etc/hosts if ranks take long to meet.")
    seconds = time.monotonic() - began
    if seconds > _SLOW:
        return note(value, f"Looking up this host's own name, {name}, took {seconds:.0f} s, which "
                           "every launch pays: add it to /etc/hosts.")
    return ok(value)


def listening() -> Found:
    """Sockets beyond loopback: of ranks while they work, and of this user's other programs."""
    from labs import launch
    from labs.training.presets import preset

    sent = launch(_wait_and_list, ranks=preset().ranks, quiet=True)
    ours = sorted({address for found in sent for address in found})
    if ours:
        return stop(f"ranks listen on {', '.join(ours)}", "Others on the network could talk to "
                    "ranks: please report it with the output of scripts/preflight.", ours=ours)
    others = _of_this_user()
    value = "ranks listen on loopback only"
    if not others:
        return ok(value, others=[])
    return note(value, f"Other programs of yours can be reached from outside: {', '.join(others)}. "
                       "Jupyter belongs on 127.0.0.1, behind ssh -L.", others=others)


def _wait_and_list() -> list[str]:
    """On a rank: the addresses beyond loopback on which it listens after a collective."""
    import torch
    import torch.distributed as dist

    from labs.workers import devices

    dist.all_reduce(torch.ones(1, device=devices.device()))  # on GPUs NCCL's sockets, too
    return beyond_loopback(psutil.Process())


def beyond_loopback(process: psutil.Process) -> list[str]:
    """"address:port" of each socket on which a process can be reached from other machines."""
    return [f"{one.laddr.ip}:{one.laddr.port}" for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN and not one.laddr.ip.startswith(_LOOPBACK)]


def _of_this_user() -> list[str]:
    found = []
    for process in psutil.process_iter(["uids", "name"]):
        try:
            # root's are the machine's own services, and not ours to judge
            if process.info["uids"].real == os.getuid() and (os.getuid() or _is_jupyter(process)):
                found += [f"{process.info['name']} on {address}"
                          for address in beyond_loopback(process)]
        except (psutil.Error, AttributeError, OSError):
            continue
    return sorted(set(found))


def _is_jupyter(process) -> bool:
    return any("jupyter" in part for part in process.cmdline()[:4])
