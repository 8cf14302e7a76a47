"""Which exercises are judged in a process that never runs a line of the submission's (judge)."""

# Their scripts run in the answer's process: the judge gets what their ranks did (started).
SCRIPTS = frozenset("0.5 2.12 3.11 4.13 5.11 6.1 6.15 7.27 7.28 8.6".split())
# And those whose check calls functions with plain arguments in its own process, and compares what
# they return. The others are checked beside the answer, under the eyes of the guard. On ranks,
# where no proxy can be sent: 3.7 (its second half trains), 7.8, 7.13, 8.10, 9.4, 9.8. With what
# only the answer's own process can be asked: 1.8 measures its memory, 8.3 and 8.4 kill it, 5.10
# refuses it the lab's reader, 7.26 compiles in JAX's, 9.6 has a gradient.
# tests/grade/test_judged_apart.py tries the answers.
VALUES = frozenset("""
    1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.10 2.1 2.5 3.1 3.8 3.9 4.2 4.11 5.1 5.3 5.4 5.5 5.8 5.9
    6.3 6.4 6.5 6.8 6.9 6.11 6.12 6.14 6.16 6.17 6.18
    7.10 7.12 7.14 7.15 7.16 7.17 7.19 7.21 7.24 7.25 8.7 8.8 8.9 8.11 8.12 9.5 9.7 9.9
    """.split())
EXERCISES = VALUES | SCRIPTS
