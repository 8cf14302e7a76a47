"""The written record of a session: a folder with tables, pictures, traces, all numbers as JSON, and
a page of notes on two papers."""
