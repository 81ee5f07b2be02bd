"""The averager's decisions: who is in, who is waited for, what a round yields; without sockets."""
