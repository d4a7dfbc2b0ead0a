"""Loads models with their weights, and applies them to images."""
