"""On a rank: what happens when the student's function sets up process groups and stores itself."""

import contextlib
import functools
import socket

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_LOOPBACK = ("127.0.0.1", "localhost")


def install(ranks: int) -> None:
    """Makes a second `init_process_group` a sentence, and stores listen on loopback alone."""
    _refuse_second_group(ranks)
    _listen_on_loopback()


def _refuse_second_group(ranks):
    initialize = c10d.init_process_group

    @functools.wraps(initialize)
    def init_process_group(*args, **kwargs):
        if dist.is_initialized():
            raise RuntimeError(
                f"launch has initialized the process group of {ranks} ranks already: leave "
                "init_process_group out, or call it only if not dist.is_initialized()")
        return initialize(*args, **kwargs)

    c10d.init_process_group = dist.init_process_group = init_process_group


def _listen_on_loopback():
    """torch's TCPStore listens on all interfaces, without authorization, unless it is given a
    socket that listens already. A script's own store, `env://` and rpc make one."""
    make = dist.TCPStore.__init__
    parameters = ("host_name", "port", "world_size", "is_master")

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if given.get("is_master") and given.get("host_name") in _LOOPBACK:
            with contextlib.suppress(OSError):  # torch will say that the port is taken
                kwargs.setdefault("master_listen_fd", _listening_socket(given.get("port", 0)))
        make(self, *args, **kwargs)

    dist.TCPStore.__init__ = __init__


def _listening_socket(port) -> int:
    """The file descriptor of a new socket that listens on a port of the loopback interface."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((_LOOPBACK[0], port))
    server.listen()
    return server.detach()
