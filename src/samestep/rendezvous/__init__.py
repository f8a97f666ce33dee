"""Connects processes that were started separately; no torch."""
