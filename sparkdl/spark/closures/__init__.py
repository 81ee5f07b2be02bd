"""What the user's functions refer to, and bytes on their way to the executors."""
