"""Runs as figures and as a page."""
