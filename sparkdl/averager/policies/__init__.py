"""Who is waited for, in a round and before one; used by the decisions only."""
