"""Who is waited for, in a round and before one; asked by the decisions, known to no socket."""
