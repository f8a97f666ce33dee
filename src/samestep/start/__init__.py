"""Outside the workers: starting, watching and ending them; no torch."""
