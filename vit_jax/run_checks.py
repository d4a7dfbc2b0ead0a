"""What can be wrong with a run, before its first step.

`setup` raises all errors at once, before anything is compiled or a data set is
prepared.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax
from flax.traverse_util import flatten_dict

from vit_jax import (
  batch,
  missing_data,
  optim_checks,
  sharding,
  step_checks,
  weights,
)
from vit_jax.batch import Data
from vit_jax.checkpointing import checkpointer, resume_rules, retention
from vit_jax.config import Config, ConfigError, EvaluatorConfig
from vit_jax.config.checks import option_errors, size_errors, warmup_errors
from vit_jax.data.preprocessing import image_size
from vit_jax.data.sources import Sources
from vit_jax.distributed import agreement
from vit_jax.experiment import Experiment
from vit_jax.options import unexpected
from vit_jax.paths import run_path
from vit_jax.trainable import BASE, Trainable
from vit_jax.weights import source_file
from vit_jax.writers import atomic_files, trackers
from vit_jax.writers.metric_writer import METRICS, SCORES


def setup(
  config: Config,
  workdir: str | None = None,
  data: Data | None = None,
  *,
  scored_weights: weights.Weights | None = None,
  sources: Sources | None = None,
  allow_change: Iterable[str] = (),
  on_shrunk: Callable[[], object] = lambda: None,
  errors: Iterable[str] = (),
) -> Experiment:
  """Returns the `Experiment` of these arguments, after checking it.

  Args:
    config: See `Experiment`, also for the other arguments.
    errors: Errors of the command line, raised with all others.

  Raises:
    ConfigError: All errors at once.
  """
  experiment = Experiment(
    config, workdir, data, scored_weights, sources, allow_change, on_shrunk
  )
  check(experiment, errors)
  if experiment.is_training:  # collective, and the step is traced in a thread
    experiment.read_labels()
  return experiment


def check(run: Experiment, errors: Iterable[str] = ()) -> None:
  """Raises if options, machine or disk show that the run cannot work.

  Args:
    errors: Errors of the command line, raised with all others.

  Raises:
    ConfigError: All errors.
  """
  config = run.config
  sizes = size_errors(config, run.is_training)
  data = data_errors(run)
  is_new = run.is_training and not run.start
  absent = {e.name for e in run.missing_evals}
  every = [
    *errors,
    *sizes,
    *option_errors(config, run.is_training, is_new),
    *mesh_errors(config),
    *(trackers.errors(config) if run.is_training else ()),
    *(e for k, part in data.items() if k not in absent for e in part),
    *missing_data.advice(config, run.missing_evals),
  ]
  # What follows needs the shapes of model and data.
  is_known = not sizes and not data[""]
  if is_known and run.is_training:
    every += length_and_head_errors(run) + _resume_errors(run)
  if is_known:
    unmade = _learner_errors(run, is_first=not every)
    is_known = not unmade
    every += unmade
  if is_known and run.is_training:
    if not any(error.startswith("config.optim.") for error in every):
      every += _parameter_errors(run)
  for e in run.evals if is_known else ():
    where = f"config.evals.{e.name}"
    has_errors = any(error.startswith(where) for error in every)
    if not has_errors and not data[e.name]:
      every += _evaluator_errors(run, e, where)
  every += _weights_errors(run, is_known)
  if run.workdir is not None and not every:
    every = workdir_errors(run.workdir, run.is_training)
  if every:
    raise ConfigError(dict.fromkeys(every))
  missing_data.agree(
    config.data.data_dir,
    {
      e.dataset: e not in run.skipped_evals
      for e in run.configured_evals
      if e.LEFT_OUT_BY
    },
  )
  if jax.process_count() > 1:
    _agree(run)


def data_errors(run: Experiment) -> dict[str, list[str]]:
  """Returns errors of missing splits; prepares no data set.

  Returns:
    Errors of the training data under "", of an evaluator under its name.
  """
  errors = {e.name: _evaluator_data_errors(run, e) for e in run.evals}
  return {"": _training_data_errors(run), **errors}


def _training_data_errors(run: Experiment) -> list[str]:
  """Returns errors of the training split, or of data passed to the run."""
  if run.given_data is not None:
    return given_data_errors(run.given_data)
  if not run.is_training:
    return []
  data = run.config.data
  return run.sources.errors(
    data.dataset, data.split, "config.data.dataset", "config.data.split"
  )


def _evaluator_data_errors(run: Experiment, e: EvaluatorConfig) -> list[str]:
  """Returns an error for each missing split of an evaluator."""
  (written,) = (w for w in run.config.evals if w.name == e.name)
  where = f"config.evals.{e.name}"
  at = "config.data" if written.dataset is None else where
  return [
    error
    for option in e.SPLITS
    for error in run.sources.errors(
      e.dataset, getattr(e, option), f"{at}.dataset", f"{where}.{option}"
    )
  ]


def workdir_errors(workdir: str, is_training: bool) -> list[str]:
  """Makes the folder; returns an error if it cannot be written to."""
  folder = run_path(workdir)
  try:
    with atomic_files.os_errors(folder):
      folder.mkdir(parents=True, exist_ok=True)
      with (folder / (METRICS if is_training else SCORES)).open("a"):
        pass
      if is_training and jax.process_index() == 0:
        retention.probe(folder / checkpointer.FOLDER)
  except OSError as e:
    return [atomic_files.folder_error(workdir, e)]
  return []


def given_data_errors(data: object) -> list[str]:
  """Returns why an object passed as data is not a `batch.Data`."""
  errors = []
  for key in ("num_examples", "num_classes"):
    value = getattr(data, key, None)
    if not isinstance(value, int) or value < 1:
      errors.append(f"data.{key}: got {value!r}, expected an int, 1 or more.")
  names = getattr(data, "class_names", ())
  if names is not None and len(names) != getattr(data, "num_classes", None):
    expected = "one for each of data.num_classes, or None"
    errors.append(unexpected("data.class_names", len(names), expected))
  if not callable(getattr(data, "batches", None)):
    errors.append("data.batches: missing, see vit_jax.batch.Data.")
  return errors


def mesh_errors(config: Config) -> list[str]:
  """Returns errors of the mesh on all devices of all processes."""
  if errors := sharding.mesh_errors(config):
    return errors
  return sharding.row_errors(sharding.make_mesh(config.mesh))


def length_and_head_errors(run: Experiment) -> list[str]:
  """Returns errors of the run's length and of the head, given the data."""
  errors, info = [], run.data_info
  if run.config.total_steps is None:
    errors += warmup_errors(run.config, run.run_shape.total_steps)
  repeats = run.config.data.repeats
  if repeats > 1 and not getattr(info, "is_by_number", True):
    expected = f"1, because the records of {info.name!r} are streamed"
    hint = "Files that vit-jax prepare writes (array_record) have repeats."
    errors.append(unexpected("config.data.repeats", repeats, expected, hint))
  name = getattr(info, "name", type(info).__name__)
  got, needed = run.run_shape.num_classes, info.num_classes
  if got < needed or (batch.has_vectors(info) and got > needed):
    expected = f"the {needed} of {name!r}, or None"
    errors.append(unexpected("config.num_classes", got, expected))
  kind, rows = run.config.objective.kind, run.config.data.batch_size
  if run.config.objective.compares_images and info.num_examples < rows:
    expected = (
      f"at most the {info.num_examples:,} images of {name!r}, because"
      f" config.objective.kind={kind!r} compares the images of a batch"
    )
    errors.append(unexpected("config.data.batch_size", rows, expected))
  if not needed and run.config.objective.reads_labels:
    expected = f"one that needs no classes, because {name!r} has none"
    return [*errors, unexpected("config.objective.kind", repr(kind), expected)]
  if run.config.objective.trains_head and not got:
    expected = f"the classes of the head, because {name!r} has none"
    return [*errors, unexpected("config.num_classes", None, expected)]
  is_multilabel = getattr(info, "is_multilabel", False)
  if run.config.init_head == "linear_probe" and is_multilabel:
    expected = f"'zeros', because an image of {name!r} can have several classes"
    errors.append(
      unexpected("config.init_head", repr(run.config.init_head), expected)
    )
  return [*errors, *run.config.objective.data_errors(info)]


def _resume_errors(run: Experiment) -> list[str]:
  """Returns errors of --allow_change, and of changes that are not allowed."""
  resumed = run.resumed
  old = resumed.old_config.values if resumed else {}
  errors = resume_rules.flag_errors(run.allow_change, run.config, old)
  if resumed is None:
    return errors + run.newest[1]
  return errors + resumed.errors(
    run.run_shape, run.data_info, run.head.class_names
  )


def _learner_errors(run: Experiment, is_first: bool) -> list[str]:
  """Returns why the objective cannot make what the step needs.

  Args:
    is_first: Whether there is no other error, which may be the reason.
  """
  objective, model = run.config.objective, run.config.model
  where = "config.objective"
  try:
    if run.is_training:
      models = run.objective_models
      shape = run.run_shape
      if errors := list(objective.make_errors(model, shape, models)):
        return errors
      for name, path in objective.models().items():
        run.files[name] = source_file.of_params(path, models[name].params)
      began = run.saved.get("models", {})
      changed = [
        f"{where}: {error}"
        for name in objective.models().keys() & began.keys()
        if (
          error := source_file.difference(
            run.files[name], began[name]["digest"]
          )
        )
      ]
      if changed:
        return changed
    learner, _ = run.learner, run.shapes
    if not (run.is_training and is_first):
      return []
    outputs = (run.run_shape.num_classes,)
    label = outputs if batch.has_vectors(run.data_info) else ()
    return step_checks.errors(run.config, run.run_shape, learner, label)
  except Exception as e:
    if isinstance(e, OSError | ValueError):
      return [str(e) if str(e).startswith("config.") else f"{where}: {e}"]
    if is_first:  # otherwise another error is the reason
      raise
    return []


def _parameter_errors(run: Experiment) -> list[str]:
  """Returns errors of options that name parameters or linear maps."""
  model, own = run.config.model, run.config.objective.own
  names = flatten_dict(run.shapes[1], sep="/")
  for option, is_one, is_needed in (
    ("HEADS", model.is_head, run.config.objective.trains_head),
    ("BLOCKS", lambda k: model.block_of(k) is not None, model.BLOCKS),
  ):
    if is_needed and not any(map(is_one, names)):
      return [
        f"config.model.name: got {model.name!r}, whose {option}"
        f" {getattr(model, option)!r} match none of its parameters, such as"
        f" {next(reversed(names))}."
      ]
  if run.config.init_head != "zeros" and not any(map(model.is_head, names)):
    return [
      f"config.init_head: got {run.config.init_head!r}, expected 'zeros': no"
      " parameter is the head's"
      f" ({type(model).__name__}.HEADS: {model.HEADS!r})."
    ]
  config = dataclasses.replace(
    run.config, optim=dataclasses.replace(run.config.optim, freeze=())
  )
  try:
    params, _ = jax.eval_shape(
      lambda params: Trainable(config).split(params, jax.random.key(0)),
      run.shapes[1],
    )
  except ValueError as e:
    return [str(e)]
  return optim_checks.errors(run.config.optim, params, model, own)


def _evaluator_errors(
  run: Experiment, e: EvaluatorConfig, where: str
) -> list[str]:
  """Returns errors of an evaluator, given head, layers and its data."""
  if e.scores_head and not run.head.num_classes:
    if run.scored_weights is None:
      return []  # `option_errors` reports it
    return [
      f"--checkpoint: got {run.scored_weights.path!r}, which has no head;"
      " expected one, or --fewshot=<dataset>."
    ]
  try:
    run.open_models(e.models(), image_size(e.ops))
  except (OSError, ValueError) as error:
    return [f"{where}: {error}"]
  splits = {
    option: run.sources.inspect(e.dataset, getattr(e, option))
    for option in e.SPLITS
  }
  errors = list(e.kind_errors(where, splits, run.head))
  errors += e.model_errors(where, run.config.model)
  return errors or list(e.check(where, splits, run.head, run.shapes[0]))


def _weights_errors(run: Experiment, are_shapes_known: bool) -> list[str]:
  """Returns errors of the weights to start from, or to score.

  Args:
    are_shapes_known: Whether the weights can be fitted to the model.
  """
  adapts = run.is_training and bool(run.config.lora.rank)
  if adapts and not run.config.init and run.workdir is not None:
    return [
      "config.init: got None beside config.lora.rank="
      f"{run.config.lora.rank}, expected the weights to adapt, which"
      " checkpoints do not have."
    ]
  if run.is_training and not run.config.init:
    return []
  if run.is_training and run.start and not adapts:
    return []
  key = "config.init" if run.is_training else "--checkpoint"
  try:
    read = run.read_weights()
    if run.is_training and not adapts:
      mean = run.config.init_mean
      run.files[source_file.INIT] = source_file.of_weights(read, mean)
    if adapts:
      base = source_file.of_weights(read, run.config.init_mean)
      run.files[BASE] = base
      began = run.saved.get(BASE, base._asdict())
      if error := source_file.difference(base, began["digest"]):
        return [f"{key}: {error}"]
    if not are_shapes_known:
      return []
    new = run.fit_weights(read).reinitialised
  except (OSError, ValueError) as e:
    hint = ""
    if not (run.is_training or run.config.init):
      hint = (
        "\nIf the config takes init=PATH (folder, finetune), add"
        f" init={read.path} to it: then model and image size are those of the"
        " weights."
      )
    return [f"{key}: {e}{hint}"]
  trainable = Trainable(run.config)
  if frozen := [k for k in new if adapts and not trainable.trains_whole(k)]:
    return [
      f"{key}: got no {', '.join(frozen)}, which config.lora would leave at"
      " random; expected weights that have it, or a model without."
    ]
  if new and not run.is_training:
    return [
      f"{key}: got a head other than {', '.join(new)}; set"
      " config.model.pre_logits as it was trained."
    ]
  return []


def _agree(run: Experiment) -> None:
  """Checks that all processes have the same run; see `agreement`."""
  data = (
    {"the data given": run.given_data} if run.given_data is not None else {}
  )
  if run.is_training and not data:
    data["config.data"] = run.data_info
  for e in run.evals:
    for option in e.SPLITS:
      data[f"config.evals.{e.name}.{option}"] = run.sources.inspect(
        e.dataset, getattr(e, option)
      )
  agreement.check(agreement.of_run(run.config, data, run.fitted_params))
  if run.is_training and run.workdir is not None:
    agreement.check_folder(run.workdir)
