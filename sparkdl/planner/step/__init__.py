"""What one step takes: memory, layers, the minibatch, and which blocks compute again."""
