"""Turns the files of runs into figures and a page."""
