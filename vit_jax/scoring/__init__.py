"""Scores of published weights beside their published figures."""
