"""Estimates memory, time and cost of a run on a slice of TPUs."""
