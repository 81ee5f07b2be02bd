"""What a job leaves: its output, there whole or not at all, and its result as JSON."""
