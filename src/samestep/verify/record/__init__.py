"""Runs inside the workers of `samestep verify`: records what a script does, with some suspected causes removed."""
