"""Inside a worker: who it is, what is its share, which weights stay equal, and what is saved."""
