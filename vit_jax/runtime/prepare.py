"""Looks at a whole run before anything is compiled, and tells all at once."""

from collections.abc import Callable, Iterable

import jax
from etils import epath

from vit_jax import checkpoint, sharding, weights
from vit_jax.config import Config, ConfigError
from vit_jax.config.checks import faults as word_faults
from vit_jax.config.checks import warmup_faults
from vit_jax.config.preprocessing import image_size
from vit_jax.data import sources
from vit_jax.evaluators.fewshot import layer_of
from vit_jax.ridge import sample_shots
from vit_jax.runtime import run_info
from vit_jax.runtime.writer import METRICS, SCORES
from vit_jax.step import Facts

# What a run began with cannot be changed under way.
FIXED = ("seed", "init", "fake_data", "num_classes", "data.dataset")


def check(
  config: Config,
  workdir: str | None = None,
  faults: Iterable[str] = (),
  head: weights.Head | None = None,
) -> None:
  """Raises if a run cannot work: words, machine, disk.

  Args:
    config: The run.
    workdir: Folder that its files go to; where that holds a checkpoint,
      config.init is not looked at, since the run resumes.
    faults: What was found before, to be told in the same breath.
    head: That of a checkpoint that shall be evaluated, not trained; None for a
      training run.

  Raises:
    ConfigError: With every fault.
  """
  is_training = head is None
  found = [*faults, *word_faults(config, is_training), *mesh_faults(config)]
  found += sources.faults(config, is_training)
  checks: list[Callable[[], list[str]]] = [
    lambda: evaluator_faults(config, head)
  ]
  if is_training:
    checks += [lambda: run_faults(config)]
    if start := _step_reached(workdir):
      checks += [lambda: resume_faults(config, workdir, start)]
    elif config.init:
      checks += [lambda: init_faults(config)]
  for look in checks:
    try:
      found += look()
    except (AssertionError, TypeError, ValueError, ZeroDivisionError):
      if not found:
        raise
      # No model or no data to look at, for a reason that is told already.
  if workdir is not None and not found:
    found += workdir_faults(workdir, METRICS if is_training else SCORES)
  if found:
    raise ConfigError(dict.fromkeys(found))


def workdir_faults(workdir: str, file: str) -> list[str]:
  """The folder must be one that the file can be written to; makes it."""
  try:
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).open("a").close()
  except OSError as e:
    return [
      f"--workdir: got {workdir!r}, where no files can be written"
      f" ({e.strerror or e}); expected a folder, there or to be made."
    ]
  return []


def total_steps(config: Config, source: sources.Source) -> int:
  """Returns the length of a run in steps.

  Args:
    config: Its total_steps, or its total_epochs over the source.
    source: The split to train on.
  """
  if config.total_steps is not None:
    return config.total_steps
  return max(
    1, round(config.total_epochs * source.num_examples / config.data.batch_size)
  )


def open_train(config: Config) -> sources.Source:
  """Opens the split that a run trains on."""
  data = config.data
  return sources.open_source(
    data.dataset, data.split, data.data_dir, fake=config.fake_data
  )


def _look_at_train(config: Config) -> sources.Source:
  """As `open_train`, but makes no data set."""
  data = config.data
  return sources.look_at(
    data.dataset, data.split, data.data_dir, fake=config.fake_data
  )


def mesh_faults(config: Config) -> list[str]:
  """The mesh must fit the devices, and the batches the mesh."""
  axes = [getattr(config.mesh, axis) for axis in sharding.AXES]
  if any(n < 1 and n != -1 for n in axes) or axes.count(-1) > 1:
    return []  # told by its words
  try:
    shape = sharding.mesh_shape(config.mesh, jax.device_count())
  except ValueError as e:
    return [str(e)]
  parts, processes = shape["data"] * shape["fsdp"], jax.process_count()
  if parts % processes:
    return [
      f"config.mesh: got data*fsdp = {parts}, which {processes} processes"
      " cannot share: each must hold whole rows of a batch; use a multiple of"
      f" {processes}, and config.mesh.tensor within a process."
    ]
  batches = {"config.data.batch_size": config.data.batch_size}
  for e in config.evals:
    if e.batch_size is not None:
      batches[f"config.evals.{e.name}.batch_size"] = e.batch_size
  found = []
  for key, size in batches.items():
    if size > 0:
      found += sharding.batch_faults(key, size, shape)
  return found


def run_faults(config: Config) -> list[str]:
  """The length of the run and its head must fit the data."""
  found = []
  source = _look_at_train(config)
  if config.total_steps is None:
    found += warmup_faults(config, total_steps(config, source))
  if config.num_classes and config.num_classes < source.num_classes:
    found.append(
      f"config.num_classes: got {config.num_classes}, expected at least the"
      f" {source.num_classes} classes of {source.name!r}, or None."
    )
  return found


def evaluator_faults(
  config: Config, head: weights.Head | None = None
) -> list[str]:
  """Evaluators must fit the head, the model's layers and the labels.

  Args:
    config: The run.
    head: None: as training would make it.
  """
  if not config.evals:
    return []
  if head is None:
    train = _look_at_train(config)
    num_classes = config.num_classes or train.num_classes
    head = weights.Head(num_classes, train.class_names)
  _, out = _shapes(config, head.num_classes)[0]
  found = []
  for e in config.evals:
    where = f"config.evals.{e.name}"
    split = e.split if e.kind == "classification" else e.train_split
    source = sources.look_at(
      e.dataset or config.data.dataset,
      split,
      config.data.data_dir,
      fake=config.fake_data,
    )
    if e.kind == "classification":
      try:
        weights.match(source, head)
      except ValueError as error:
        found.append(f"{where}.dataset: {error}")
      continue
    try:
      jax.eval_shape(lambda out, e=e: layer_of(out, e.layer), out)
    except ValueError as error:
      found.append(f"{where}.layer: {error}")
    if source.knows_labels and max(e.shots, default=0):
      try:
        sample_shots(source.labels(), max(e.shots), 0)
      except ValueError as error:
        found.append(f"{where}.shots: {error}")
  return found


def resume_faults(config: Config, workdir: str, start: int) -> list[str]:
  """A run goes on as it began, and not to a step that lies behind it."""
  found = [
    f"{text}: the run in {workdir} goes on as it began; take another --workdir,"
    " or delete that one."
    for key, text in run_info.changes(config, workdir).items()
    if key in FIXED
  ]
  source = _look_at_train(config)
  was = run_info.class_names(workdir)
  if was and source.class_names and was != source.class_names:
    found.append(
      f"config.data.dataset: got the {len(source.class_names)} classes"
      f" {weights.some(source.class_names)}, but the run in {workdir} began"
      f" with the {len(was)} classes {weights.some(was)}; take another"
      " --workdir."
    )
  num_steps = total_steps(config, source)
  if start > num_steps:
    found.append(
      f"config.total_steps: got {num_steps}, expected at least the {start}"
      f" steps that {workdir} has done; or take another --workdir."
    )
  return found


def init_faults(config: Config) -> list[str]:
  """The weights to start from must be there, and fit the model."""
  try:
    found = weights.read(config.init)
  except (FileNotFoundError, ValueError) as e:
    return [f"config.init: {e}"]
  source = _look_at_train(config)
  _, variables = _shapes(config, config.num_classes or source.num_classes)
  try:
    weights.adapt(
      found,
      variables["params"],
      config.model,
      image_size(config.data.ops),
      class_names=source.class_names,
    )
  except ValueError as e:
    return [f"config.init: {e}"]
  return []


def _shapes(config: Config, num_classes: int):
  """Shapes of ((logits, out), variables) of the model on one image."""
  size = image_size(config.data.ops)
  module, _ = config.objective.make(config.model, Facts(num_classes, size))
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  return jax.eval_shape(module.init_with_output, jax.random.key(0), images)


def _step_reached(workdir: str | None) -> int:
  """The step that a run goes on from; 0 for a new one."""
  try:
    return int(checkpoint.find(workdir).name) if workdir else 0
  except FileNotFoundError:
    return 0
