"""A worker's rows as columns of tensors, of equal or unequal length, and what a model is given."""
