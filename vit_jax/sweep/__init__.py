"""The points of a hyperparameter search and its table."""
