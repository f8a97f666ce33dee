"""All ranks of a run as one: who this is, how they found each other, their small messages and totals."""
