"""Scores checkpoints and published weights."""
