"""nbgrader's configuration for a course with these notebooks: copy it beside the course's `source/`,
and notebooks/NN_name.ipynb into source/WEEK/.

Not for a class that might cheat: nbgrader runs a submission with all rights of who grades.
`scripts/grade` isolates each.
"""

c = get_config()  # noqa: F821  nbgrader defines it

# The builder has cut the answers out already. nbgrader would replace whole cells, with the first
# line of a function and its docstring.
c.ClearSolutions.enabled = False
# Seconds of a cell: a check starts ranks several times.
c.Execute.timeout = 600
