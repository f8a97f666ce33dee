"""The state of a run on disk: taken, committed, found again, and when to stop."""
