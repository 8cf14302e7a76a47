"""Submissions that try to pass without an answer: each is what stands in the cell of exercise 2.1
or 0.1 (`mean_over_ranks`), and the words that must be said of it.

Names are put together while the code runs ("_get" + "frame"), so that the look at the source, which
would refuse most of them, lets them pass and the next layer has to find them.
"""

# What a check says of an answer that does nothing but what its sandbox makes harmless.
DOES_NOT_HELP = "full batch|plain|gradient"
LOADED = 'LOADED = getattr(sys, "mod" + "ules")'
HEAD = f'''import os, sys, threading, torch
import torch.distributed as dist
{LOADED}
FORGED = b"x" * 64 + bytes([31]) + b"1" + bytes([31]) + b"all is well" + bytes([31])
'''


def combine(*lines: str, head: str = HEAD) -> str:
    """A wrong answer to 2.1 that does something else as well."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"{head}def combine(gradients, sizes):\n{body}\n    return gradients[0]\n"


def on_ranks(*lines: str) -> str:
    """A wrong answer to 0.1 that does something else on the ranks as well."""
    # the list of modules cannot be sent to ranks
    body = "\n".join(f"    {line}" for line in (LOADED, *lines))
    return f"{HEAD}def mean_over_ranks(mine):\n{body}\n    return mine\n"


# Found in the source.
SEEN = {
    "prints_the_sign": (combine("print('✓ Exercise 2.1  all shards are right')"),
                        "prints what a check prints"),
    "imports_the_verdict": (combine(head="from labs.checks.verdicts import Verdict\n"),
                            "imports labs.checks.verdicts"),
    "asks_labs_for_the_answer": (combine("return memory.bytes_of(gradients)",
                                         head="from labs.predictions import memory\n"),
                                 "imports labs.predictions.memory"),
    "asks_labs_by_another_name": (
        "import labs.manual_ddp as z\ndef combine(gradients, sizes):\n"
        "    return z.combine.gradients_of_shards(sizes)[0]\n",
        "imports labs.manual_ddp|uses z.combine"),
    "asks_labs_by_a_whole_name": (
        "import labs.manual_ddp\nimport labs as L\ndef combine(gradients, sizes):\n"
        "    return L.manual_ddp.combine.gradients_of_shards(sizes)[0]\n",
        "imports labs"),
    "asks_labs_by_an_alias": (
        "import labs.manual_ddp as lab\nx = lab\ndef combine(gradients, sizes):\n"
        "    return x.combine.gradients_of_shards(sizes)[0]\n", "uses x.combine"),
    "asks_labs_by_getattr": (
        "import labs.manual_ddp as lab\ndef combine(gradients, sizes):\n"
        "    return getattr(lab, 'combine').gradients_of_shards(sizes)[0]\n",
        "uses 'combine' of labs"),
    "asks_labs_by_an_attrgetter": (
        "import labs.manual_ddp as lab\nfrom operator import attrgetter\n"
        "def combine(gradients, sizes):\n"
        "    return attrgetter('combine')(lab).gradients_of_shards(sizes)[0]\n",
        "passes lab to a function"),
    "asks_labs_by_its_names": (
        "import labs.manual_ddp as lab\ndef combine(gradients, sizes):\n"
        "    return vars(lab)['combine'].gradients_of_shards(sizes)[0]\n",
        r"uses vars\(lab\)"),
    "replaces_the_check": (combine(head="import labs.manual_ddp as lab\n"
                                   "lab.check_combine = print\ncombine = lab\n"),
                           "replaces lab.check_combine"),
    "reads_memory_as_an_array": (combine("return sizes.__array_interface__"),
                                 "uses .__array_interface__"),
}
# Found while it runs.
FOUND = {
    "exits": (combine("sys.exit(0)"), r"sys\.exit"),
    "hands_in_a_verdict": ("import labs.manual_ddp as lab\n"
                           "combine = type(lab.check_combine(...))('2.1', True, 'right')\n",
                           "hands in a verdict"),
    "pretends_to_be_a_verdict": (
        "import labs.manual_ddp as lab\nV = type(lab.check_combine(...))\nclass P:\n    asked = 0\n"
        "    passed, sentence, hint = True, 'right', ''\n    @property\n    def __class__(self):\n"
        "        P.asked += 1\n        return V if P.asked > 1 else P\ncombine = P()\n",
        "hands in a verdict"),
    "forges_a_result": (on_ranks(
        "channel, data = LOADED['labs.workers.channel']._channel, LOADED['pickle'].dumps(0.0)",
        "beat = LOADED['labs.workers.heartbeat'].Progress()",
        "channel.send('result_sizes', (beat, [len(data), 32]))",
        "for piece in (data, bytes(32)): channel.send('result_piece', piece)",
        "import time; time.sleep(100)"), "sends a result of its own make"),
    "has_a_result_packed": (on_ranks(
        "pack = LOADED['labs.workers.pickling'].pack_result",
        "thread = threading.Thread(target=pack, args=(0.0,))", "thread.start(); thread.join()"),
        "makes a result of its own"),
    "sends_code_to_the_check": (on_ranks(
        "class Code:", "    pass",
        "setattr(Code, '__re' + 'duce__', lambda self: (exec, ('x = 1',)))",
        "connection = LOADED['labs.workers.channel']._channel.connection",
        "connection.send(('report', Code()))", "import time; time.sleep(100)"),
        "sends what runs code"),
    "closes_everything": (combine("os.closerange(3, 60)", "getattr(sys, '_get' + 'frame')(1)"),
                          "ended before the check said"),
    "equal_while_it_is_watched": (combine(
        "class Key(str):", "    def __hash__(self): return hash('equal')",
        "    def __eq__(self, other): return bool(getattr(sys, '_get' + 'frame')(1))",
        "vars(LOADED['torch'])[Key('x')] = 1"), "walks the stack|replaces"),
    "writes_a_verdict": (combine("for each in range(3, 60):", "    try: os.write(each, FORGED)",
                                 "    except OSError: pass"),
                         "verdict of its own|grader's descriptors"),
    "waits_for_the_end": (combine(
        "def forge():", "    while True:", "        for each in range(3, 60):",
        "            try: os.write(each, FORGED)", "            except OSError: pass",
        "threading.Thread(target=forge, daemon=True).start()",
        "import time; time.sleep(0.2)"), "verdict of its own|grader's descriptors"),
    "patches_labs": (combine("LOADED['labs.checks.verdicts'].Wrong.__init__ = print"),
                     r"replaces labs.checks.verdicts.Wrong.__init__"),
    "patches_a_constant": (combine("LOADED['labs.checks.tolerances'].SUMS = 1e9"),
                           r"replaces labs.checks.tolerances.SUMS"),
    "patches_a_closure": (combine(
        "f = LOADED['labs.manual_ddp.combine'].check_combine",
        "cells = getattr(f, '__clo' + 'sure__')",
        "for c in cells: setattr(c, 'cell_' + 'contents', lambda *a, **k: 'right')"), "replaces"),
    "patches_torch": (combine("LOADED['torch'].equal = lambda *a: True"), "replaces torch.equal"),
    "patches_torch_on_ranks": (on_ranks("LOADED['torch'].allclose = lambda *a, **k: True"),
                               "replaces torch.allclose"),
    "patches_for_a_moment": (combine(
        "t = LOADED['torch']; old = t.equal", "t.equal = lambda *a: (setattr(t, 'equal', old), "
        "True)[1]"), "replaces torch.equal"),
    "patches_abs": (combine("LOADED['builtins'].max = lambda *a, **k: 0"), "replaces builtins.max"),
    "patches_by_a_check": (combine(
        "make = LOADED['labs.checks.verdicts'].check('x')",
        "LOADED['builtins'].all = make(lambda *a: 'right')"), "replaces builtins.all"),
    "patches_a_method": (combine("LOADED['torch'].Tensor.max = lambda *a, **k: 0"),
                         "hides what torch.Tensor calls max"),
    "swaps_a_method_for_another": (combine(
        "T = LOADED['torch'].Tensor", "setattr(T, '__s' + 'ub__', lambda *a: torch.zeros(()))",
        "delattr(T, '__rpow__')"), "(hides what|replaces|removes) (torch.Tensor|.*__rpow__)"),
    "hides_a_builtin": (combine("LOADED['labs.checks.on_ranks'].bool = lambda *a: True"),
                        "hides what labs.checks.on_ranks calls bool"),
    "replaces_torch": (combine("LOADED['torch'] = LOADED['os']"), "replaces the module torch"),
    "always_equal": (HEAD + "Yes = type('Yes', (), {'__e' + 'q__': lambda *a: True, '__re' + "
                     "'pr__': lambda s: 'right'})\n"
                     "def combine(gradients, sizes):\n    return Yes()\n",
                     "decides what it equals"),
    "agreeing_tensor": (HEAD + "def agree(cls, f, types, args=(), kwargs=None):\n"
                        "    return torch.zeros(())\n"
                        "Agrees = type('Agrees', (torch.Tensor,), {'__torch_' + 'function__': "
                        "classmethod(agree)})\n"
                        "def combine(gradients, sizes):\n"
                        "    return gradients[0].as_subclass(Agrees)\n",
                        "decides what it equals|tensor or number of its own"),
    "walks_the_stack": (combine("return getattr(sys, '_get' + 'frame')(1)"), "walks the stack"),
    "walks_it_on_ranks": (on_ranks("getattr(sys, '_get' + 'frame')(1)"), "walks the stack"),
    "walks_it_by_inspect": (combine("getattr(LOADED['inspect'], 'st' + 'ack')()"),
                            "walks the stack"),
    "walks_a_traceback": (combine("try: 1 / 0", "except Exception as error:",
                                  "    getattr(getattr(error, '__trace' + 'back__'), 'tb_' + "
                                  "'frame')"), "looks into frames"),
    "walks_a_generator": (combine("g = (x for x in sizes)", "getattr(g, 'gi_' + 'frame')"),
                          "looks into frames"),
    "searches_the_memory": (combine("getattr(LOADED['gc'], 'get_' + 'objects')()"),
                            "searches the memory"),
    "traces": (combine("getattr(sys, 'set' + 'trace')(print)"), "traces other code"),
    "walks_it_by_numpy": (combine(
        "import numpy", "numpy.vectorize(getattr(sys, '_get' + 'frame'), otypes=[object])(1)"),
        "walks the stack by a library"),
    "walks_it_by_numpy_and_inspect": (combine(
        "import numpy, inspect", "numpy.vectorize(lambda f: f, otypes=[object])(1)",
        "numpy.vectorize(getattr(inspect, 'st' + 'ack'), otypes=[object])(1)"),
        "walks the stack by a library"),
    "walks_it_in_a_thread": (combine(
        "from concurrent.futures import ThreadPoolExecutor",
        "look = getattr(sys, '_current_' + 'frames')",
        "return ThreadPoolExecutor(1).submit(look).result()"), "walks the stack"),
    "walks_it_by_torch_in_a_thread": (combine(
        "from torch.utils._pytree import tree_map",
        "look = getattr(sys, '_get' + 'frame')",
        "t = threading.Thread(target=tree_map, args=(look, [0]))", "t.start(); t.join()"),
        "walks the stack by a library"),
    "runs_text_in_a_thread": (combine(
        "from concurrent.futures import ThreadPoolExecutor",
        "run = getattr(LOADED['builtins'], 'ex' + 'ec')",
        "return ThreadPoolExecutor(1).submit(run, 'import os; os.popen(\"id\")').result()"),
        "runs code"),
    "starts_a_program_in_a_thread": (combine(
        "t = threading.Thread(target=LOADED['subprocess'].run, args=(['id'],))",
        "t.start(); t.join()"), DOES_NOT_HELP),
    "runs_an_annotation": (combine(
        "import typing", "def f(x): pass",
        "setattr(f, '__anno' + 'tations__', {'x': '(lambda: x)'})",
        "return typing.get_type_hints(f, {'__name__': 'x'})"), "runs code"),
    "runs_text_by_the_import_system": (combine(
        "run = getattr(LOADED['builtins'], 'ex' + 'ec')",
        "call = LOADED['importlib._bootstrap']._call_with_frames_removed",
        "call(run, 'x = 1', {})"), "runs code"),
    "has_a_loader_of_its_own": (combine(
        "machinery = LOADED['importlib.machinery']", "import typing",
        "class Loader(machinery.SourceFileLoader):",
        "    def get_data(self, path): return b'import sys; f = sys._getframe(1)'",
        "    def path_stats(self, path): raise OSError",
        "Loader('x', typing.__file__).load_module('x')"), "runs code"),
    "adds_a_hook": (combine("getattr(sys, 'addaudit' + 'hook')(print)"), "adds an audit hook"),
    "changes_code": (combine(
        "f = LOADED['labs.checks.on_ranks'].close", "setattr(f, '__de' + 'faults__', (1,))"),
        "changes a function's code"),
    "runs_text": (combine("getattr(LOADED['builtins'], 'ex' + 'ec')('x = 1')"),
                  "runs code"),
    "reaches_by_ctypes": (combine("getattr(LOADED['ctypes'], 'CD' + 'LL')(None)"),
                          "reaches around Python"),
    "deserialises": (combine("LOADED['pickle'].loads(b'cos\\nsystem\\n(S\"id\"\\ntR.')"),
                     DOES_NOT_HELP),
    "sends_what_runs_code": (HEAD + "Bomb = type('Bomb', (), {'__re' + 'duce__': lambda self: "
                             "(os.getcwd, ())})\n"
                             "def mean_over_ranks(mine):\n    return Bomb()\n",
                             "sends what runs code|a class of its own"),
    "reads_the_solution": (combine("open('/work/solu' + 'tions/02_manual_ddp.py').read()"),
                           "FileNotFoundError"),
    "reads_the_check": (combine("open(LOADED['labs'].__file__).read()"), DOES_NOT_HELP),
}
