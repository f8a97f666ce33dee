"""Which process of how many this one is, and what of the machine is its own; no torch."""
