"""Everything that knows about Spark: sessions, slots, checks, launching workers, inference."""
