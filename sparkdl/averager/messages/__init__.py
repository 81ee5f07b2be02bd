"""What both ends send each other, and what is reported about a run: values and their checks."""
