"""Python imports this by itself at its start, in the kernel, the fork server and torchrun's ranks
alike: it is on PYTHONPATH. Imports nothing of torch: the patches follow torch's own import."""

import os

if os.environ.get("PRETEND_NO_JUPYTER"):
    import no_jupyter

    no_jupyter.hide()

if os.environ.get("PRETEND_LINES"):
    import sys

    import gpu_lines

    sys.meta_path.insert(0, gpu_lines.Importer())

if os.environ.get("PRETEND_GPUS"):
    import pretend_gpus

    pretend_gpus.install()  # before the importer above: a patch follows the code that it has marked
