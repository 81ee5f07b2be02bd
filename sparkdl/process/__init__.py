"""What belongs to a whole process: random numbers, torch's settings and its compiler."""
