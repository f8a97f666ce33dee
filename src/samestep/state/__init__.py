"""A state as bytes: checked when read, whole or not at all when written; no torch, no training."""
