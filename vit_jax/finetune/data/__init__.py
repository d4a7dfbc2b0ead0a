"""Own images as data sets: folders, CSV, parquet, WebDataset, the hub's."""
