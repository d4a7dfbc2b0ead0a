"""Reads what XLA compiled for a slice, and searches for a faster program."""
