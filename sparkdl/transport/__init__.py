"""Connections between workers and driver: reached, proved, encrypted, framed, with deadlines."""
