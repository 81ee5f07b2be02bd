"""Who is waited for, in a round and before one; asked by the decisions, without any sockets."""
