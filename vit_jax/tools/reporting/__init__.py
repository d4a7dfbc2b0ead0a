"""Makes pages and figures from the files of runs."""
