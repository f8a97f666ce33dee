"""Starts, watches and ends workers, from outside; no torch."""
