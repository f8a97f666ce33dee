"""Runs scripts to measure them, reads their results, and explains where the time goes."""
