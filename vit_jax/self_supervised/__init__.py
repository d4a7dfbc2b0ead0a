"""Learning without labels: objectives and evaluators after the paper."""
