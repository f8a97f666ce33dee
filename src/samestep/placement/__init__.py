"""The placement of a process: its rank, size and node, and its devices and cores; no torch."""
