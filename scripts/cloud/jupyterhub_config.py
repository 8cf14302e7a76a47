"""A JupyterHub for a class: what its own configuration needs for this workbook.

One copy of the workbook, at WORKBOOK, that students may read and not write; each has a folder
~/workbook with copies of the notebooks, and traces and results beside them.
"""

import os

WORKBOOK = "/opt/workbook"
AT_ONCE = 16  # students who compute at the same time

c = get_config()  # noqa: F821  JupyterHub defines it

c.Spawner.cmd = [f"{WORKBOOK}/scripts/cloud/single-user"]
# A launch divides these cores among its ranks, whether or not the spawner enforces the limit:
# the workbook reads CPU_LIMIT, which JupyterHub makes of it, and the quota of a control group.
c.Spawner.cpu_limit = max(1.0, (os.cpu_count() or 1) / AT_ONCE)
# Four ranks and a kernel take up to 3 GB. Not every spawner enforces it: systemd's, Docker's and
# Kubernetes' do.
c.Spawner.mem_limit = "4G"
c.Spawner.default_url = "/lab/tree/work/00_start_here.ipynb"
