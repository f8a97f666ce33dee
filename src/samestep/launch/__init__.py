"""Outside the workers: starts them, watches them, and says how they ended; never imports torch."""
