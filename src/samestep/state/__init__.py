"""A state as bytes: checked when read, all or nothing when written; no torch, no training."""
