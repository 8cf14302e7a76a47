"""Honest code that looks suspicious, for exercises on ranks and for those that are judged apart:
each is (what stands before the answer, what it begins with). None of it is forged or refused."""

IDIOMS = {
    "a_named_tuple": ("from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n"
                      "    b: str = ''\n", "    Pair(1)\n"),
    "torch_compile": ("import torch\n@torch.compile\ndef twice(x):\n    return 2 * x\n",
                      "    twice(torch.ones(2))\n"),
    "torch_jit_script": ("import torch\n@torch.jit.script\ndef scripted(x: torch.Tensor):\n"
                         "    return 2 * x\n", ""),
    "logging": ("import logging\n", "    logging.warning('here', stack_info=True)\n"),
    "logs_an_exception": ("import logging\n", "    try:\n        1 / 0\n    except Exception:\n"
                          "        logging.exception('here')\n"),
    "prints_a_traceback": ("import traceback\n", "    try:\n        1 / 0\n    except Exception:\n"
                           "        traceback.print_exc()\n"),
    "breakpoint": ("", "    breakpoint()\n"),
    "docstring": ("", "    'see /proc/self/status, solutions/02_manual_ddp.py, eval'\n"),
    "unused_imports": ("import subprocess, socket, pickle, signal, importlib, inspect, gc\n", ""),
    "get_type_hints": ("import typing\ndef hinted(x: 'int | None', y: 'list[int]' = ()) -> 'str':\n"
                       "    pass\n", "    typing.get_type_hints(hinted)\n"),
    "signature": ("import inspect\ndef f(x, *, y=2):\n    pass\n",
                  "    inspect.signature(f).bind(1, y=3)\n"),
    "source": ("import inspect\n", "    inspect.getfullargspec(print)\n"),
    "pickles_a_model": ("import pickle, io\nimport torch\n",
                        "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
                        "    pickle.loads(pickle.dumps(model))\n"
                        "    torch.save(model.state_dict(), file := io.BytesIO())\n"
                        "    file.seek(0); torch.load(file)\n"),
    "copies_a_model": ("import copy\nimport torch\n",
                       "    copy.deepcopy(torch.nn.Linear(2, 2))\n"),
    "wraps": ("import functools\ndef logged(f):\n    @functools.wraps(f)\n"
              "    def inner(*a):\n        return f(*a)\n    return inner\n@logged\n"
              "def half(x):\n    return x / 2\n", "    half(2); half.__wrapped__\n"),
    "caches": ("import functools\n@functools.cache\ndef cached(x):\n    return x\n",
               "    cached(1)\n"),
    "contextlib": ("import contextlib\n@contextlib.contextmanager\ndef here():\n    yield 1\n",
                   "    with here(), contextlib.suppress(ValueError):\n        raise ValueError\n"),
    "dataclasses": ("from dataclasses import dataclass, field\n@dataclass(order=True, slots=True)\n"
                    "class Two:\n    a: int\n    b: list = field(default_factory=list)\n",
                    "    Two(1) < Two(2)\n"),
    "an_enum": ("import enum\nclass Kind(enum.Enum):\n    A = enum.auto()\n", "    Kind.A\n"),
    "match": ("", "    match [1, 2]:\n        case [a, *rest]:\n            pass\n"),
    "lambdas": ("square = lambda x: x * x\n", "    sorted([3, 1], key=lambda x: -square(x))\n"),
    "nested": ("def outer():\n    count = 0\n    def inner():\n        nonlocal count\n"
               "        count += 1\n        return count\n    return inner\n", "    outer()()\n"),
    "a_global_counter": ("CALLS = 0\n", "    global CALLS\n    CALLS += 1\n"),
    "save_on_cpu": ("import torch\n", "    with torch.autograd.graph.save_on_cpu():\n"
                    "        torch.ones(2, requires_grad=True).exp().sum().backward()\n"),
    "catch_warnings": ("import warnings\n", "    with warnings.catch_warnings(record=True):\n"
                       "        warnings.simplefilter('always'); warnings.warn('x')\n"),
    "profile": ("import torch\n", "    with torch.profiler.profile(with_stack=True,\n"
                "            record_shapes=True) as seen:\n        torch.ones(2) + 1\n"
                "    seen.key_averages().table()\n"),
    "autograd_profile": ("import torch\n", "    with torch.autograd.profiler.profile():\n"
                         "        torch.ones(2) + 1\n"),
    "functional_call": ("import torch\n", "    model = torch.nn.Linear(2, 2)\n"
                        "    torch.func.functional_call(model, dict(model.named_parameters()),"
                        " torch.ones(2))\n"),
    "an_autograd_function": ("import torch\nclass Twice(torch.autograd.Function):\n"
                             "    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
                             "    @staticmethod\n    def backward(ctx, g):\n        return 2 * g\n",
                             "    Twice.apply(torch.ones(2, requires_grad=True)).sum().backward()"
                             "\n"),
    "a_thread": ("from concurrent.futures import ThreadPoolExecutor\n",
                 "    with ThreadPoolExecutor(1) as pool:\n"
                 "        pool.submit(sum, [1]).result()\n"),
    "a_program": ("import subprocess\n", "    subprocess.run(['true'])\n"),
    "a_file": ("", "    with open('notes.txt', 'w') as file:\n        file.write('x')\n"),
    "reads_status": ("", "    open('/proc/self/status').read()\n"),
    "memory_use": ("import resource\n", "    resource.getrusage(resource.RUSAGE_SELF)\n"),
    "psutil": ("import psutil\n", "    psutil.Process().memory_info()\n"),
    "pytree": ("from torch.utils import _pytree\n", "    _pytree.tree_map(abs, [1, {'a': -2}])\n"),
    "named_tuple_old": ("from collections import namedtuple\nP = namedtuple('P', 'a b')\n",
                        "    P(1, 2)._replace(a=3)\n"),
}
