"""What the averager decides: who is in, who is waited for, what a round comes to; no socket."""
