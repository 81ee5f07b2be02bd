"""What is found in the rows while they are read, and what of it is refused."""
