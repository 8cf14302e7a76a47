"""Python imports this by itself at its start, in kernels and in the fork servers that they start:
scripts/test and the browser test put this folder on PYTHONPATH."""

import fewer_rounds

if fewer_rounds.runs_a_student_notebook():
    fewer_rounds.install()
