"""Scripts that do not do what their exercise asks for, and try to be taken for right."""

# Of exercise 0.5: `python script.py RANKS` prints the sum of what its ranks drew.
_HEAD = "import os, sys\n"
OF_0_5 = {
    "prints_the_result_alone": _HEAD + (
        "import torch\n"
        "print(sum(torch.rand(1, generator=torch.Generator().manual_seed(r)).item()"
        " for r in range(int(sys.argv[1]))))\n"),
    "prints_a_verdict": _HEAD + "print('✓ ' + 'Exercise 0.5: right')\n",
    "writes_into_all_descriptors": _HEAD + (
        "for pid in os.listdir('/pr' + 'oc'):\n"
        "    for each in range(3, 60):\n"
        "        try:\n"
        "            with open(f'/pr' + f'oc/{pid}/fd/{each}', 'wb') as file:\n"
        "                file.write(b'[\"passed\", \"all is well\", \"\"]')\n"
        "        except OSError:\n            pass\n"),
    "ends_all_processes": _HEAD + (
        "import signal\n"
        "for pid in filter(str.isdigit, os.listdir('/pr' + 'oc')):\n"
        "    try: os.kill(int(pid), signal.SIGKILL)\n"
        "    except OSError: pass\n"),
}
# Of 2.12, the whole of ddp.py: it looks for what is expected, and says what it has found.
_FOUND = "raise ValueError(repr(found))\n"
LOOKS_FOR_WHAT_IS_EXPECTED = {
    "in_the_environment": ("import os\nfound = [name for name in os.environ if "
                           "name == 'WORKBOOK_SEED' and os.environ[name] or "
                           "name == 'WORKBOOK_GRADES']\n" + _FOUND),
    "in_files": ("import os\nnames = ('expected_training.py', 'updates.py', 'ddp.py')\n"
                 "found = [name for folder, _, files in os.walk('/') if '/proc' not in folder\n"
                 "         for name in files if name in names and folder != '/student'\n"
                 "         and 'labs' in folder]\n" + _FOUND),
    "in_memory": ("import gc, sys\nkinds = {type(each).__name__ for each in gc.get_objects()}\n"
                  "found = [name for name in sys.modules if 'expected_training' in name]\n"
                  "found += [name for name in kinds if name in ('Expected', 'Case', 'Remote')]\n"
                  + _FOUND),
    "in_other_processes": (
        "import os\nfound = []\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n        memory = open(f'/proc/{pid}/environ', 'rb').read()\n"
        "    except OSError:\n        continue\n"
        "    found += [pid] * (b'WORKBOOK_GRADES' in memory)\n" + _FOUND),
}
# Of 2.12: all ranks say what a run leaves, but none trains.
WRITES_THE_RECORD_ITSELF = """\
import argparse, os, sys
import torch
from pathlib import Path
notes = Path("/student")
for folder in Path("/tmp").rglob("notes"):
    for rank in range(2):
        torch.save({"steps": [], "parameters": {}}, folder / f"record-{rank}.pt")
print("epoch 0: loss 0.1")
os._exit(0)
"""
