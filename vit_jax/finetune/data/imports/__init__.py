"""The sources that `vit-jax prepare` imports, one file for each kind.

A kind is a function (path or name, options) -> `Listing`: the classes and, for
each split, the number of records and a way to read them. A new kind is a file
here, a line in `KINDS` and a word in the help of commands/prepare.py.
"""

from collections.abc import Callable

from vit_jax.finetune.data.imports import (
  csv_files,
  folders,
  hugging_face,
  parquet,
  webdataset,
)
from vit_jax.finetune.data.imports.listing import Listing, Options

# Prefix of a source -> function of what follows it.
KINDS: dict[str, Callable[[str, Options], Listing]] = {
  "folder:": folders.scan,
  "csv:": csv_files.scan,
  "webdataset:": webdataset.scan,
  "parquet:": parquet.scan,
  "hf:": hugging_face.scan,
}
