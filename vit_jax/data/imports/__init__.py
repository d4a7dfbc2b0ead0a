"""What `vit-jax prepare` imports: one file for each kind of source.

A kind is a function (path or name, options) -> `Listing`: the classes and, for
each split, the number of records and a way to read them. A new one is a file
here and a line in `KINDS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.data.imports import folders, hugging_face, parquet, webdataset
from vit_jax.data.imports.listing import Listing, Options


class Kind(NamedTuple):
  """A kind of source; `meaning` is for --help."""

  meaning: str
  scan: Callable[[str, Options], Listing]


KINDS = {
  "folder:": Kind("/path with a folder of images per class", folders.scan),
  "webdataset:": Kind(
    "/path or glob of tars with .jpg or .png and .cls", webdataset.scan
  ),
  "parquet:": Kind("/path or glob of files of columns", parquet.scan),
  "hf:": Kind(
    "NAME or NAME:CONFIG of a Hugging Face data set, or the folder of a saved"
    " one",
    hugging_face.scan,
  ),
}
