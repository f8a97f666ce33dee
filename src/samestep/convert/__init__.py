"""Turns a serial script, and the files of its project, into one that runs on any number of processes."""
