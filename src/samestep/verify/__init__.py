"""Tests whether a script takes the same step with any number of processes: records, compares and explains runs."""
