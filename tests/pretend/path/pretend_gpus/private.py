"""What the pretend node takes of torch that is no API: three objects in C++'s libc10.so. They are
looked up when torch is imported; where they are not as expected, that import fails with a sentence.
"""

import ctypes
import platform
import sys
from pathlib import Path

CUDA, META = 1, 14  # c10::DeviceType
_TRIED = 123_457  # bytes: a size that nothing else has
_WORDS = 32  # of the reporter, in which the count is looked for


class AnotherTorch(ImportError):
    """This torch, or this machine, is not one that the pretend node knows."""


def live_bytes():
    """Makes c10 count the bytes of all tensors on the CPU; returns the number, which follows it.

    It is a member of the object that reports allocations to profilers, which has no function to
    read it: an allocation is reported that is none, to see which number grows.
    """
    library = _libc10()
    _switch(library, "FLAGS_caffe2_report_cpu_memory_usage")
    reporter = _function(library, "_ZN3c1025profiledCPUMemoryReporterEv", ctypes.c_void_p)
    allocate = _function(library, "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm", None,
                         ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    free = _function(library, "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv", None,
                     ctypes.c_void_p, ctypes.c_void_p)
    place, block = reporter(), ctypes.create_string_buffer(1)
    words = (ctypes.c_size_t * _WORDS).from_address(place)
    before = list(words)
    allocate(place, block, _TRIED)
    during = list(words)
    free(place, block)
    found = [index for index, (now, then, after) in enumerate(
        zip(during, before, words, strict=True)) if now - then == _TRIED and after == then]
    if len(found) != 1:
        raise AnotherTorch(_sentence("c10's count of allocated bytes was not found"))
    return ctypes.c_size_t.from_address(place + found[0] * ctypes.sizeof(ctypes.c_size_t))


def default_allocator():
    """Returns the first word of c10's allocator for the CPU, which points to its functions."""
    require(platform.machine() == "x86_64", "the allocator's function is replaced by x86-64 code")
    found = _function(_libc10(), "_ZN3c1022GetDefaultCPUAllocatorEv", ctypes.c_void_p)()
    return ctypes.c_void_p.from_address(found)


def require(holds, what):
    """Raises AnotherTorch unless it holds; what: what does not."""
    if not holds:
        raise AnotherTorch(_sentence(what))


def link_guard():
    """Lets C++ guard the device "cuda": with the guard of "meta", which changes nothing."""
    library = _libc10()
    try:
        guards = (ctypes.c_void_p * (META + 1)).in_dll(
            library, "_ZN3c104impl26device_guard_impl_registryE")
    except ValueError:
        raise AnotherTorch(_sentence("c10 has no registry of device guards")) from None
    if guards[CUDA] not in (None, guards[META]):
        raise AnotherTorch(_sentence("it is built for CUDA, and a build for the CPU is needed"))
    if not guards[META]:
        raise AnotherTorch(_sentence('c10 has no guard for the device "meta"'))
    guards[CUDA] = guards[META]


def _libc10():
    path = Path(sys.modules["torch._C"].__file__).parent / "lib/libc10.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        raise AnotherTorch(_sentence(f"{path} is not there, as it is on Linux")) from None


def _function(library, name, result, *arguments):
    try:
        function = getattr(library, name)
    except AttributeError:
        raise AnotherTorch(_sentence(f"c10 has no {name}")) from None
    function.restype, function.argtypes = result, arguments
    return function


def _switch(library, name):
    try:
        ctypes.c_bool.in_dll(library, name).value = True
    except ValueError:
        raise AnotherTorch(_sentence(f"c10 has no {name}")) from None


def _sentence(what):
    version = sys.modules["torch.version"].__version__
    return (f"The pretend node does not work with torch {version} on {platform.system()} "
            f"{platform.machine()}: {what}. See \"What it takes of torch's inside\" in "
            "tests/pretend/README.md.")
