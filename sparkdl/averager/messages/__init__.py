"""What both ends say to each other, and what is told of a run: values, and their checks."""
