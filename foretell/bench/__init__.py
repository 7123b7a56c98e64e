"""Measurements of a loaded model: every comparison is of runs that alternate within one process."""
