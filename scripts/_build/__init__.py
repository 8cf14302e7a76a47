"""Turns `solutions/NN_name.py` into the solution notebook and the student notebook.

source.py    reads a py:percent file into cells and solution regions, with their source lines
student.py   the student's version of a cell: gaps in place of solutions; finds leaks
lint.py      what a cell may not be: too long, too wordy, plotting
links.py     links to the notebooks before and after, and to the glossary
notebook.py  cells as a notebook file: fixed ids and metadata, bytes, atomic writing
execute.py   runs a solution notebook and tidies its outputs
command.py   the command line: build, --check
"""
