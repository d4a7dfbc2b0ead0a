"""Looks at a whole run before anything is compiled, and tells all at once."""

from collections.abc import Iterable

import jax
from etils import epath

from vit_jax import checkpoint, sharding, weights
from vit_jax.config import Config, ConfigError, has_cls_row, patch_grid
from vit_jax.data import sources
from vit_jax.faults import faults as word_faults
from vit_jax.faults import warmup_faults
from vit_jax.models import build
from vit_jax.opstring import image_size


def check(
  config: Config, workdir: str | None = None, faults: Iterable[str] = ()
) -> None:
  """Raises if a run cannot work: words, machine, disk.

  Args:
    config: The run.
    workdir: Its folder; where that holds a checkpoint, config.init is not
      looked at, since the run resumes.
    faults: What was found before, to be told in the same breath.

  Raises:
    ConfigError: With every fault.
  """
  faults = [*faults, *word_faults(config), *mesh_faults(config)]
  data_faults = sources.faults(config)
  if not faults and not data_faults:
    # These need a model and a data set that can be built at all.
    num_steps = total_steps(config)
    faults += warmup_faults(config, num_steps)
    if config.init and not _resumes(workdir):
      faults += init_faults(config)
  elif config.init:
    faults += missing_init_faults(config)
  faults = list(dict.fromkeys(faults + data_faults))
  if faults:
    raise ConfigError(faults)


def total_steps(config: Config) -> int:
  """Returns the length of a run in steps; the data set must be there."""
  if config.total_steps is not None:
    return config.total_steps
  source = open_train(config)
  return max(
    1, round(config.total_epochs * source.num_examples / config.data.batch_size)
  )


def open_train(config: Config) -> sources.Source:
  """Opens the split that a run trains on."""
  data = config.data
  return sources.open_source(
    data.dataset, data.split, data.data_dir, fake=config.fake_data
  )


def mesh_faults(config: Config) -> list[str]:
  """The mesh must fit the devices, and the batches the mesh."""
  try:
    shape = sharding.mesh_shape(config.mesh, jax.device_count())
  except (ValueError, ZeroDivisionError) as e:
    return [str(e)] if min(vars(config.mesh).values()) >= -1 else []
  batches = [("config.data.batch_size", config.data.batch_size, True)]
  for e in config.evals:
    if e.batch_size is not None:
      batches.append((f"config.evals.{e.name}.batch_size", e.batch_size, False))
  found = []
  for key, size, is_train in batches:
    accum = config.optim.accum_steps if is_train else 1
    if size > 0 and accum > 0 and size % accum == 0:
      found += sharding.batch_faults(key, size, accum, shape)
  return found


def missing_init_faults(config: Config) -> list[str]:
  """The weights to start from must be there."""
  try:
    if not epath.Path(config.init).is_file():
      checkpoint.find(config.init)
  except FileNotFoundError as e:
    return [f"config.init: {e}"]
  return []


def init_faults(config: Config) -> list[str]:
  """The weights to start from must fit the model."""
  if missing := missing_init_faults(config):
    return missing
  size = image_size(config.data.ops)
  num_classes = config.num_classes or open_train(config).num_classes
  model = build(config.model, num_classes)
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  try:
    weights.adapt(
      weights.read(config.init),
      shapes,
      grid=patch_grid(config.model, size),
      has_cls_row=has_cls_row(config.model),
    )
  except ValueError as e:
    return [f"config.init: {e}"]
  return []


def _resumes(workdir: str | None) -> bool:
  try:
    return workdir is not None and bool(checkpoint.find(workdir))
  except FileNotFoundError:
    return False
