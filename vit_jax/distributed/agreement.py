"""Compares what must be equal in all processes of a run, before it begins.

Each process reads its own config and its own disk. If they differed, replicas
of the parameters would silently become different, or processes would wait for
each other forever.
"""

import hashlib
import json
import pathlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from vit_jax import digests
from vit_jax.batch import DataInfo
from vit_jax.config import Config, ConfigError, flat, to_dict
from vit_jax.data.preprocessing import image_size
from vit_jax.models import efficient_attention
from vit_jax.options import shown, unexpected
from vit_jax.paths import FOLDERS, run_path, with_options

# A file system may take so long to show a host what another has written.
VISIBLE_SECONDS = 90.0
# Settings of jax that change numbers; environment variables set them, too.
SETTINGS = (
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_numpy_dtype_promotion",
)


def broadcast_text(text: str) -> str:
  """Returns the text of process 0, in all processes. Collective."""
  if jax.process_count() == 1:
    return text
  data = np.frombuffer(text.encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
  if not size:
    return ""
  data = np.resize(data, size) if data.size else np.zeros(size, np.uint8)
  return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).decode()


def of_run(
  config: Config, data: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values that must be equal, for `check`.

  Hosts may have their files in different places, if the content is the same.

  Args:
    config: The run.
    data: Option that names the data -> a `batch.Data` or a source of records.
    params: Initial parameters from a file; {} if there are none.
  """
  options = {f"config.{k}": v for k, v in flat(to_dict(config)).items()}
  for key in ("config.data.data_dir", "config.init"):
    options.pop(key, None)
  for key, value in options.items():
    if isinstance(value, str) and value.startswith(FOLDERS):
      name, _ = with_options(value)
      options[key] = name.partition(":")[0] + value.removeprefix(name)
  sums = digests.of_numpy(params).items()
  return {
    **{f"version of {m.__name__}": m.__version__ for m in (jax, flax, optax)},
    **{name: str(getattr(jax.config, name, None)) for name in SETTINGS},
    "attention": efficient_attention.describe_implementation(
      config.model, image_size(config.data.ops), jax.devices()[0].platform
    ),
    **options,
    **{f"records of {name}": of_data(source) for name, source in data.items()},
    **{f"initial value of {name}": digest.sums for name, digest in sums},
    **_of_code(),
  }


def _of_code() -> dict[str, str]:
  """Returns the digest of each file of this package.

  Hidden files, which editors and notebooks leave behind, are left out.
  """
  root = pathlib.Path(__file__).parents[1]
  paths = {p.relative_to(root): p for p in sorted(root.rglob("*.py"))}
  return {
    f"code of vit_jax/{name}": hashlib.sha256(p.read_bytes()).hexdigest()[:16]
    for name, p in paths.items()
    if p.is_file() and not any(part.startswith(".") for part in name.parts)
  }


def identity(data: DataInfo) -> str:
  """Returns a digest of the records of data, see `Source`; "" if unknown.

  Args:
    data: A user's `Data`, whose attribute `identity` may be anything, or a
      `Source`.
  """
  compute = getattr(data, "identity", None)
  return compute() if callable(compute) else ""


def of_data(data: DataInfo) -> str:
  """Returns the number of images and classes, and digests of both, as text."""
  text = f"{data.num_examples} of {data.num_classes} classes"
  if data.class_names is not None:
    names = "\0".join(data.class_names).encode("utf-8", "surrogateescape")
    text += f", names {digests.of_bytes(names)}"
  return ", ".join(filter(None, (text, identity(data))))


def check(values: Mapping[str, Any]) -> None:
  """Compares values of all processes. Collective.

  Args:
    values: Name -> value for JSON. Processes may have different names and
      values.

  Raises:
    ConfigError: In all processes, if values differ. Each process that differs
      from process 0 has its differences in the message.
  """
  text = _text(values)
  mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  every = np.asarray(multihost_utils.process_allgather(mine))
  differ = np.flatnonzero((every != every[0]).any(axis=1)).tolist()
  if not differ:
    return
  first = json.loads(broadcast_text(text))
  differences = [*_differences(json.loads(text), first)]
  others = f"got other options, data or versions in {_named(differ)}."
  raise ConfigError(differences or [others])


def _text(value: Any) -> str:
  return json.dumps(value, sort_keys=True, default=str)


def _differences(
  mine: Mapping[str, Any], first: Mapping[str, Any]
) -> Iterator[str]:
  index = jax.process_index()
  keys = [
    k for k in {**first, **mine} if _text(first.get(k)) != _text(mine.get(k))
  ]
  for key in keys:
    got = f"{shown(mine.get(key))} in process {index}"
    yield unexpected(key, got, f"{shown(first.get(key))} as in process 0")


def check_folder(workdir: str) -> None:
  """Checks that all processes have the same folder. Collective.

  Raises:
    ConfigError: In all processes, if one does not see the file of process 0.
  """
  name = broadcast_text(f"process.seen-{secrets.token_hex(8)}")
  path = run_path(workdir) / name
  try:
    if jax.process_index() == 0:
      path.write_text("")
    multihost_utils.sync_global_devices(name)  # until it is written
    end = time.monotonic() + VISIBLE_SECONDS
    while not (is_there := path.exists()) and time.monotonic() < end:
      time.sleep(1.0)
    every = np.asarray(multihost_utils.process_allgather(np.bool_(is_there)))
  finally:  # also after a stop
    if jax.process_index() == 0:
      path.unlink(missing_ok=True)
  if not every.all():
    missing = _named(np.flatnonzero(~every.ravel()).tolist())
    got = f"{workdir!r}, where {missing} cannot find what process 0 writes"
    shared = "a folder that all hosts share"
    raise ConfigError([unexpected("--workdir", got, shared)])


def _named(processes: list[int]) -> str:
  numbers = ", ".join(map(str, processes))
  return f"process{'es' * (len(processes) > 1)} {numbers}"
