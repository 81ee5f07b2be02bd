"""From Arrow record batches to tensors: every row once per epoch, without Python per row."""
