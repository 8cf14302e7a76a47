"""Exercise 7.22: the wrong rows of a published table of meshes."""

from collections.abc import Callable

from labs.checks.numbers import as_number
from labs.checks.verdicts import Wrong, check, kind_of
from labs.pipeline_parallel.published_meshes import LLAMA_3, MeshRow

# name -> (how many rows are wrong, the table): other rows, several, or none.
MADE_UP = {
    "a table without a mistake": (0, [MeshRow(8192, 8, 1, 16, 64), MeshRow(1024, 4, 2, 4, 32)]),
    "a table with two mistakes": (2, [MeshRow(512, 8, 1, 4, 32), MeshRow(512, 8, 1, 4, 16),
                                      MeshRow(96, 2, 3, 4, 2), MeshRow(64, 1, 1, 1, 64)]),
    "a table whose size is too large": (1, [MeshRow(2048, 8, 4, 8, 16)]),
    "a table of one GPU": (0, [MeshRow(1, 1, 1, 1, 1)])}


@check("7.22")
def check_wrong_rows(wrong_rows: Callable):
    """wrong_rows(rows) -> row number -> the data-parallel size that its GPUs leave, for each row
    whose printed one is another."""
    for name, (wrong, rows) in {"Llama 3's table": (1, LLAMA_3), **MADE_UP}.items():
        want = {number: row.gpus // (row.tensor * row.context * row.pipeline)
                for number, row in enumerate(rows) if row.data * row.tensor * row.context
                * row.pipeline != row.gpus}
        assert len(want) == wrong, f"{name}: {len(want)} rows are wrong"
        returned = wrong_rows(list(rows))
        if not isinstance(returned, dict):
            raise Wrong(f"{name}: wrong_rows returned {kind_of(returned)}, not a dictionary",
                        "Row number -> the right size.", code="wrong_type")
        for number, size in returned.items():
            for what, value in (("key", number), ("size", size)):
                if as_number(value) is None:
                    raise Wrong(f"{name}: the dictionary has {kind_of(value)} as a {what}",
                                "Row number -> the right size.", code="not_a_number")
        # Numbers of NumPy and floats without a fraction are equal to ints, also as keys.
        got = {as_number(number): as_number(size) for number, size in returned.items()}
        # The invariant: exactly the rows whose product is not the number of GPUs, each with the
        # size that makes it so. A constant answer for Llama 3's table fails on the made-up tables.
        for number in sorted(set(want) - set(got)):
            raise Wrong(f"{name}: row {number} is wrong, and you do not name it: {rows[number]}",
                        "The product of the four sizes is the number of GPUs.",
                        code="missing_entry")
        for number in sorted(set(got) - set(want)):
            raise Wrong(f"{name}: you call row {number} wrong"
                        + (f", but {rows[number]}" if number in range(len(rows)) else
                           ", and there is no such row"), "Rows count from 0.", code="extra_entry")
        for number, size in want.items():
            if got[number] != size:
                raise Wrong(f"{name}: row {number} leaves {size} data-parallel ranks, you say "
                            f"{got[number]}: {rows[number]}",
                            "Divide the GPUs by all other sizes.", code="wrong_number")
    return "row 2 of Llama 3's table prints 4 where the product leaves 8; tables drawn here, too"
