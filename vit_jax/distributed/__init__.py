"""Processes of a run: joining them, agreement, exit codes."""
