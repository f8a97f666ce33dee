"""How processes that were started apart find each other; no torch."""
