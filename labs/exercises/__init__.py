"""What the checks of all notebooks share: verdicts, guesses, running on ranks, the reference,
the comparison of strategies, and a student's previous notebook."""
