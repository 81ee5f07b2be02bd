"""What Spark delivers: record batches, taken apart, completed from files, decoded to tensors."""
