"""What both ends say to each other, and what is reported of a run: values, and their checks."""
