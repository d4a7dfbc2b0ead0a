"""Files of parameters that a run reads, as its metadata record them.

The base of adapters and the further models of an objective are in no
checkpoint: a resumed run reads them again, and checks their digest. The weights
of config.init are read once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax import digests
from vit_jax.paths import absolute
from vit_jax.weights import download
from vit_jax.weights.weights_file import Weights

INIT = "init"  # key of the metadata for the weights of config.init


class SourceFile(NamedTuple):
  """A file, and the digest of its arrays.

  path: Path or address; a path on disk is absolute, an address of the hub has
    the commit, see `download.pinned`.
  mean: config.init_mean.
  digest: Digest of all arrays, as they were read.
  """

  path: str
  mean: str | None
  digest: str


def of_weights(weights: Weights, mean: str | None) -> SourceFile:
  """Returns the file of weights; reads all arrays.

  Args:
    weights: Weights of config.init.
    mean: config.init_mean.
  """
  return of_params(weights.path, dict(weights.params), mean)


def of_params(
  path: str, params: Mapping[str, Any], mean: str | None = None
) -> SourceFile:
  """Returns the file of parameters, a nested dict of arrays."""
  if download.is_remote(path):
    path = download.pinned(path)
  else:
    path = str(absolute(epath.Path(path)))
  sums = digests.of_numpy(dict(params))  # lazy arrays are read one by one
  digest = digests.of_json({k: [d.dtype, d.sums] for k, d in sums.items()})
  return SourceFile(path, mean, digest)


def difference(file: SourceFile, digest: str) -> str | None:
  """Returns an error if a file is not the one from which a run began."""
  if file.digest == digest:
    return None
  got, expected = file.digest[:8], digest[:8]
  return f"{file.path!r}: got digest {got} of its arrays, expected {expected}."
