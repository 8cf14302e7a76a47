"""torch.cuda: devices, streams, events and random numbers of the pretend node."""

import contextlib
import time
from types import SimpleNamespace

import torch

from pretend_gpus import machine, memory, state


class Stream:
    """A CUDA stream on which everything has been done as soon as it is asked for."""

    _next = 0

    def __init__(self, device=None, priority=0, stream_id=None, **_):
        if stream_id is None:
            Stream._next += 1
            stream_id = Stream._next
        self.device = torch.device("cuda", state.index(device))
        self.device_index, self.device_type = self.device.index, 1
        self.stream_id, self.priority, self.cuda_stream = stream_id, priority, stream_id

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.device_index, self.stream_id) == (
            other.device_index, other.stream_id)

    def __hash__(self):
        return hash((self.device_index, self.stream_id))

    def __repr__(self):
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"

    def __enter__(self):
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exception):
        self._context.__exit__(*exception)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def is_capturing(self):
        return False

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass


class Event:
    """A CUDA event; its time is that of the CPU's clock when it is recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False,
                 **_):
        self._timing, self._at = enable_timing, None

    def record(self, stream=None):
        state.enter()
        self._at = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end._at - self._at)


CLOCK = 1.41e9  # cycles a second
_current = {}  # device -> the stream on which its work is issued


def current_stream(device=None):
    number = state.index(device)
    return _current.get(number) or Stream(number, stream_id=0)


def default_stream(device=None):
    return Stream(state.index(device), stream_id=0)


def set_stream(stream):
    if stream is not None:
        _current[stream.device_index] = stream


@contextlib.contextmanager
def _on_stream(stream):
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(before)


def stream(stream):
    return _on_stream(stream) if stream is not None else contextlib.nullcontext()


class device:
    """Context manager: changes the current GPU."""

    def __init__(self, device):
        self.idx = state.index(device) if device is not None else -1
        self.prev_idx = -1

    def __enter__(self):
        self.prev_idx = state.current_or_zero()
        if self.idx >= 0:
            state.use(self.idx)

    def __exit__(self, *_):
        if self.idx >= 0:
            state.use(self.prev_idx)
        return False


class device_of(device):
    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.is_cuda else None)


def _properties(device=None):
    state.index(device)
    kind = machine.kind()
    major, minor = kind.capability
    return SimpleNamespace(
        name=kind.name, major=major, minor=minor, total_memory=machine.total(),
        multi_processor_count=108, is_integrated=0, is_multi_gpu_board=0, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName=kind.name,
        shared_memory_per_block=49152, L2_cache_size=40 * machine.MiB, uuid="0" * 32)


def _capability(device=None):
    return machine.kind().capability


def _can_access_peer(device, peer_device):
    return device != peer_device


def _bf16(including_emulation=True):
    return including_emulation or machine.kind().capability >= (8, 0)


def _seed(seed):
    torch.default_generator.manual_seed(int(seed))


FUNCTIONS = {
    "is_available": lambda: machine.count() > 0, "device_count": machine.count,
    "_nvml_based_avail": lambda: True,
    "is_initialized": lambda: state.current is not None, "_is_in_bad_fork": lambda: False,
    "_lazy_init": state.enter, "init": state.enter, "_lazy_call": lambda call, **_: None,
    "current_device": lambda: (state.enter(), state.current)[1],
    "set_device": state.use, "device": device, "device_of": device_of,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": _capability, "get_device_properties": _properties,
    "can_device_access_peer": _can_access_peer, "synchronize": lambda device=None: state.enter(),
    "is_bf16_supported": _bf16, "is_tf32_supported": lambda: machine.kind().capability >= (8, 0),
    "Stream": Stream, "Event": Event, "current_stream": current_stream,
    "default_stream": default_stream, "set_stream": set_stream, "stream": stream,
    "is_current_stream_capturing": lambda: False, "ipc_collect": lambda: None,
    "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"], "utilization": lambda device=None: 0,
    "_sleep": lambda cycles: time.sleep(cycles / CLOCK)}
RANDOM = {
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "get_rng_state_all": lambda: [torch.get_rng_state() for _ in range(machine.count())],
    "set_rng_state_all": lambda states: torch.set_rng_state(list(states)[0]),
    "manual_seed": _seed, "manual_seed_all": _seed, "seed": lambda: torch.seed(),
    "seed_all": lambda: torch.seed(), "initial_seed": lambda: torch.initial_seed()}


def patch(module):
    """Replaces the functions of torch.cuda and of its modules from which they are imported."""
    for functions, part in ((FUNCTIONS, "streams"), (RANDOM, "random"), (memory.FUNCTIONS,
                                                                        "memory")):
        for name, function in functions.items():
            setattr(module, name, function)
            if hasattr(getattr(module, part), name):
                setattr(getattr(module, part), name, function)
