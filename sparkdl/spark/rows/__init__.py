"""A DataFrame's rows on their way to the workers: columns, partitions, packing."""
