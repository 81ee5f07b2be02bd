"""What is found wrong before any worker takes a step."""
