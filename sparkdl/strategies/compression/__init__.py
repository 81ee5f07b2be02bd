"""Ways to send gradients as something smaller, one per file."""
