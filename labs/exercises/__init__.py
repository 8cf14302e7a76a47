"""What the checks of all notebooks share: verdicts, guesses, how a number is judged, running on
ranks, the reference, the comparison of strategies, and a student's previous notebook."""
