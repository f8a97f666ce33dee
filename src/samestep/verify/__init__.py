"""Whether a script takes the same step at any number of processes: records of its runs, compared and explained."""
