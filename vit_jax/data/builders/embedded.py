"""Base classes of the builders of embedded data, which need no network."""

import importlib.util
import io

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image


class EmbeddedInfo(tfds.core.DatasetInfo):
  """Data set information that is always computed, never downloaded.

  TFDS looks for the sizes of an unprepared data set in a public bucket. These
  data sets are not there, and on a machine without network the request takes
  seconds.
  """

  def initialize_from_bucket(self) -> None:
    """Does nothing."""


class EmbeddedBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A builder whose data come with the code, so that nothing is downloaded."""

  # TFDS would look here for a list of checksums and for further metadata. To
  # find this folder by itself, some of its releases need `importlib_resources`,
  # which they do not install.
  code_path = None
  pkg_dir_path = epath.Path(__file__).parent

  def __init__(self, *, file_format: str | None = None, **kwargs):
    """Has the base class's arguments; the default format is read by index.

    Existing files are read in their own format.
    """
    super().__init__(file_format=file_format, **kwargs)
    is_open = file_format is None and not self.is_prepared()
    if is_open and importlib.util.find_spec("array_record"):
      self.info.set_file_format("array_record", override=True)

  def is_prepared(self) -> bool:
    """Whether the records are on disk. (TFDS's own warns if they are not.)"""
    return (self.data_path / "dataset_info.json").exists()

  def download_and_prepare(self, *, download_config=None, **kwargs) -> None:
    """Writes the records unless they exist; see the base class."""
    if download_config is None:
      download_config = tfds.download.DownloadConfig()
    # Never from the public bucket, which has no prepared copy of these data.
    download_config.try_download_gcs = False
    super().download_and_prepare(download_config=download_config, **kwargs)


def png(image: np.ndarray) -> io.BytesIO:
  """Encodes uint8[h, w] as a file-like PNG, for `tfds.features.Image`.

  It is several times faster than TFDS, which encodes an array with TensorFlow.
  """
  file = io.BytesIO()
  Image.fromarray(image).save(file, format="png")
  file.seek(0)
  return file
