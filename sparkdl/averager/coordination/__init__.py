"""What the averager decides: who is in, who is waited for, how a round ends; no sockets."""
