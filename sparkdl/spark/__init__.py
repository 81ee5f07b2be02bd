"""Everything that knows Spark: sessions, slots, checks, launching workers, inference."""
