"""Starting workers in Spark's tasks, and the first code that runs there."""
