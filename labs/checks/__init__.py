"""What the checks of all notebooks share: verdicts, guesses, how a number is judged, running on
ranks, the reference, the invariants on memory and on the order of events, the comparison of
strategies, and a student's previous notebook."""
