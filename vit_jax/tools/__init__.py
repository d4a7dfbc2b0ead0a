"""Tools around a run: reports, plans, sweeps, scores, files, a page to try."""
