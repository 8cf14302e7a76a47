"""How much of a submission is read. Of our notebooks with their answers the longest has 89 code
cells and 31 kB of code, and the largest with its pictures 1.2 MB: who works honestly meets none of
these limits."""

FILE = 50_000_000  # bytes of a notebook file: its pictures are in it
FILE_SECONDS = 20.0  # to read them: a disk on a slow network may be as slow as 2.5 MB/s
CELLS = 2_000  # of code
CELL = 200_000  # characters of one; what is beyond is not read
CODE = 2_000_000  # characters of all of them
LOOK_SECONDS = 30.0  # to parse and look through the code: it takes some 0.1 s
LOOK_MEMORY = 10**9  # bytes: 20 for one of the file, where JSON of text takes 5
ANSWER = 16_000_000  # bytes that the process that looks may say: the code, escaped
