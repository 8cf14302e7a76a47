"""A JupyterHub for a class whose students have accounts on this machine. The page beside this file
says what to install: jupyterhub -f /opt/workbook/scripts/cloud/jupyterhub_config.py, as root.

One copy of the workbook, at WORKBOOK, that students may read and not write; each has a folder
~/workbook with copies of the notebooks, and traces and results beside them.
"""

import os
import sys

WORKBOOK = "/opt/workbook"
GROUP = "students"  # members of this group of the machine's may log in, with their passwords
INSTRUCTORS = set()  # names of accounts that may start and stop everybody's server
AT_ONCE = 16  # students who compute at the same time
IDLE = 60 * 60  # seconds without anything asked or printed, after which a server is stopped

c = get_config()  # noqa: F821  JupyterHub defines it

c.PAMAuthenticator.allowed_groups = {GROUP}
c.Authenticator.admin_users = INSTRUCTORS

c.Spawner.cmd = [f"{WORKBOOK}/scripts/cloud/single-user"]
# A launch divides these cores among its ranks, whether or not the spawner enforces the limit:
# the workbook reads CPU_LIMIT, which JupyterHub makes of it, and the quota of a control group.
c.Spawner.cpu_limit = max(1.0, (os.cpu_count() or 1) / AT_ONCE)
# Four ranks and a kernel take up to 3 GB. Not every spawner enforces it: systemd's, Docker's and
# Kubernetes' do; the default one, of local processes, does not.
c.Spawner.mem_limit = "4G"
c.Spawner.default_url = "/lab/tree/work/00_start_here.ipynb"
c.Spawner.start_timeout = c.Spawner.http_timeout = 120

c.JupyterHub.load_roles = [{
    "name": "idle-culler", "services": ["idle-culler"],
    "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"]}]
c.JupyterHub.services = [{
    "name": "idle-culler",
    "command": [sys.executable, "-P", "-m", "jupyterhub_idle_culler", f"--timeout={IDLE}"]}]
