"""Functions and scripts of the user's own on every worker."""
