"""Data sets that several files read, written once."""

import pytest


class DigitsByFormat(dict):
  """Format of files -> a builder that has written the digits to five."""

  def __init__(self, folders):
    self.folders = folders

  def __missing__(self, file_format):
    import tensorflow_datasets as tfds

    from vit_jax.data import builders  # noqa: F401  (TFDS then knows the digits)

    path = self.folders.mktemp(file_format)
    builder = tfds.builder("digits", data_dir=path, file_format=file_format)
    config = tfds.download.DownloadConfig(num_shards=5)
    builder.download_and_prepare(download_config=config)
    return self.setdefault(file_format, builder)


@pytest.fixture(scope="session")
def digits_by_format(tmp_path_factory):
  return DigitsByFormat(tmp_path_factory)
