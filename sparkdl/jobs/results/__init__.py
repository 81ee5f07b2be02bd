"""What a job leaves: its output, all of it or nothing, and its result as JSON."""
