"""Hyperparameter search, and short trials before fine-tuning."""
