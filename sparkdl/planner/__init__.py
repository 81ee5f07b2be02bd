"""How many workers, which minibatch, period and strategy: arithmetic on measured profiles."""
