"""Which samples are this rank's, in which order, and how they reach its device."""
