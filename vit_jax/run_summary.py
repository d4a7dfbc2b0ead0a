"""The summary that a run prints before its first step, and its metadata."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from clu import parameter_overview
from jax.sharding import Mesh

from vit_jax import param_groups, sharding
from vit_jax.class_names import shortened
from vit_jax.config import Config, to_dict
from vit_jax.data.pixels import is_random
from vit_jax.data.preprocessing import image_size
from vit_jax.devices import unknown_peak
from vit_jax.distributed import agreement
from vit_jax.evaluators import groups
from vit_jax.experiment import Experiment
from vit_jax.families import ModelConfig
from vit_jax.models import efficient_attention
from vit_jax.param_groups import path_of
from vit_jax.paths import FOLDERS, with_absolute_folder
from vit_jax.step import TrainState
from vit_jax.trainable import BASE, saved_params, without_adapters
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.source_file import INIT
from vit_jax.writers import run_info

FEW_CLASSES = 10  # with at most so many classes, all counts are printed


def metadata(experiment: Experiment, state: TrainState) -> dict[str, Any]:
  """Returns the metadata that is stored beside the weights, for JSON.

  Args:
    experiment: The run.
    state: Arrays or shapes.
  """
  params = state.model_params
  if BASE in state.fixed:
    params = without_adapters(params)
  config, size = experiment.config, experiment.run_shape.image_size
  names, given = experiment.head.class_names, experiment.given_data
  given = None if given is None else type(given).__name__
  of = experiment.standardisation
  return {
    "config": _with_whole_paths(to_dict(config)),
    "image_size": list(size),
    "grid": list(config.model.grid(size)),
    "has_cls_row": config.model.has_cls_row,
    "posemb_filter": experiment.posemb_filter,
    "preprocessing": {
      "ops": eval_ops(config),
      "value_range": [-1.0, 1.0],
    },
    "num_classes": experiment.head.num_classes,
    "class_names": list(names) if names else None,
    "loss": config.objective.head_loss,
    "objective_parameters": config.objective.own,
    "num_params": run_info.num_params(params),
    "num_examples": experiment.data.num_examples,
    "data_identity": agreement.identity(experiment.data),
    # The type of a loader that was passed in place of config.data.dataset.
    "data_given": given,
    "total_steps": experiment.run_shape.total_steps,
    "averages": group_datasets(experiment),
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "processes": jax.process_count(),
    "mesh": sharding.shape_here(config.mesh),
    "versions": run_info.versions(),
    "commit": run_info.commit(),
    **({} if of is None else {"standardisation": of._asdict()}),
    **files(experiment),
  }


def files(experiment: Experiment) -> dict[str, Any]:
  """Returns the address and digest of the parameters that a run reads."""
  read = {k: file._asdict() for k, file in experiment.files.items()}
  if INIT in experiment.saved:  # which a resumed run does not read again
    read[INIT] = experiment.saved[INIT]
  result = {k: read.pop(k) for k in (BASE, INIT) if k in read}
  return result | ({"models": read} if read else {})


def _with_whole_paths(options: dict[str, Any]) -> dict[str, Any]:
  """Makes the folders of data absolute, for readers in other directories."""
  for part in (options["data"], *options["evals"].values()):
    part["dataset"] = with_absolute_folder(part["dataset"])
  return options


def group_datasets(experiment: Experiment) -> dict[str, list[str]]:
  """Returns group -> names of the data sets in its mean."""
  return {
    group: [e.dataset for e in members]
    for group, members in groups(experiment.evals).items()
  }


def sets_text(experiment: Experiment) -> str:
  """Returns lines on groups of data sets and on evaluators left out, or ""."""
  lines = [
    f"{group:<11} mean of {len(names)} data set{'s' * (len(names) > 1)}:"
    f" {', '.join(names)}"
    for group, names in group_datasets(experiment).items()
  ]
  if experiment.skipped_evals:
    names = ", ".join(e.dataset for e in experiment.skipped_evals)
    keys = {"=".join(e.LEFT_OUT_BY) for e in experiment.skipped_evals}
    lines.append(
      f"left out    {names}: not on disk (config.{', config.'.join(keys)})"
    )
  if experiment.start:
    before = experiment.saved.get("averages")
    lines += [
      f"changed     the mean {group!r} was of {', '.join(names)}; earlier and"
      " later means do not compare"
      for group, names in (before or {}).items()
      if names != group_datasets(experiment).get(group)
    ]
  return "\n".join(lines)


def classes_lines(
  counts: Sequence[int] | None, names: Sequence[str] | None
) -> list[str]:
  """Returns a line with the images of each class; [] if `counts` is None.

  Args:
    counts: Images of each class; None if unknown.
    names: Names by class, or None.

  Example:
    >>> classes_lines([40, 120], ["cat", "dog"])
    ['classes     dog 120, cat 40: the largest has 3.0 times the smallest']
    >>> classes_lines([9] * 37, None)
    ['classes     9 images each']
  """
  if not counts:
    return []
  names = names or [str(i) for i in range(len(counts))]
  order = sorted(range(len(counts)), key=lambda i: -counts[i])
  first, last = order[0], order[-1]
  most, fewest = counts[first], counts[last]
  if most == fewest:
    return [f"classes     {most:,} images each"]
  if len(counts) <= FEW_CLASSES:
    text = ", ".join(f"{names[i]} {counts[i]:,}" for i in order)
  else:
    text = (
      f"{most:,} images of {names[first]!r} to {fewest:,} of {names[last]!r}"
    )
  if not fewest:
    empty = sum(not n for n in counts)
    return [f"classes     {text}; {empty:,} without any image"]
  ratio = f"the largest has {most / fewest:,.1f} times the smallest"
  return [f"classes     {text}: {ratio}"]


def _absent_lines(experiment: Experiment) -> Iterator[str]:
  """Yields a line for each evaluator that has no images of some classes.

  Only for own data, whose splits may be made of very few images; not for fake
  data, whose classes have no names.
  """
  if experiment.config.fake_data:
    return
  for e in experiment.evals:
    if e.scores_head and e.dataset.startswith(FOLDERS):
      source = experiment.sources.inspect(e.dataset, e.split)
      if source.is_multilabel or source.is_regression:
        continue
      names = source.class_names
      counts = np.bincount(source.labels(), minlength=len(names))
      absent = [name for name, n in zip(names, counts, strict=True) if not n]
      if absent:
        yield (
          f"note        {e.name} has no images of {len(absent):,} of"
          f" {len(names):,} classes: {shortened(absent)}. Its scores say"
          " nothing about them."
        )


def _outputs(experiment: Experiment) -> str:
  """Returns the number of classes, or of numbers to predict."""
  number = experiment.data.num_classes
  if experiment.standardisation is None:
    return f"{number:,} classes" if number else "no classes"
  return f"{number:,} number{'s' * (number > 1)} to predict"


def _numbers_lines(experiment: Experiment) -> list[str]:
  """Returns a line with mean and deviation of regression targets, or []."""
  if (of := experiment.standardisation) is None:
    return []
  names = experiment.head.class_names or itertools.count()
  text = "; ".join(
    f"{name} {mean:.4g} ± {deviation:.4g}"
    for name, mean, deviation in zip(names, *of, strict=False)
  )
  return [f"numbers     {text} (mean and deviation)"]


def data_lines(experiment: Experiment) -> list[str]:
  """Returns lines on the training data: images, classes or numbers."""
  return [
    f"data        {experiment.data_name}: {experiment.data.num_examples:,}"
    f" images, {_outputs(experiment)}",
    *classes_lines(experiment.class_counts, experiment.head.class_names),
    *_absent_lines(experiment),
    *_numbers_lines(experiment),
  ]


def eval_ops(config: Config) -> str:
  """Returns the preprocessing of images for evaluation.

  Without an evaluator it is that of training. If that draws random numbers, the
  whole image is resized, as in Google's evaluation.
  """
  of_head = [e.ops for e in config.evals if e.scores_head]
  ops = [*of_head, *(e.ops for e in config.evals), config.data.ops][0]
  if not is_random(ops):
    return ops
  whole = eval_preprocessing.google(image_size(ops)).ops
  return eval_preprocessing.decoded_as(ops, whole)


def text(experiment: Experiment, mesh: Mesh, state: TrainState) -> str:
  """Returns the lines that are printed before the first step.

  Args:
    experiment: The run.
    mesh: Mesh of the run.
    state: Arrays or shapes.
  """
  config, data = experiment.config, experiment.data
  total_steps, batch = experiment.run_shape.total_steps, config.data.batch_size
  epochs = total_steps * batch / data.num_examples
  axes = " x ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
  device, size = mesh.devices.flat[0], experiment.run_shape.image_size
  options = config.optim
  has_rates = options.freeze or options.lr_scale or options.layer_decay
  has_rates = has_rates or config.lora.rank
  params, rates = state.model_params, None
  if has_rates:
    saved = saved_params(state.params, state.fixed)
    rates = param_groups.rates(options, saved, config.model)
  trained = run_info.num_params(state.params)
  count = run_info.num_params(params)
  lines = [
    parameter_table(params, config.model, rates),
    f"devices     {jax.device_count()} x {jax.devices()[0].device_kind},"
    f" {jax.process_count()} process(es); mesh {axes};"
    f" {sharding.describe(config, params, mesh)}",
    f"model       {config.model.variant or 'own'} ({config.model.name}),"
    f" {size[0]} x {size[1]} px, {count:,} parameters"
    f"{f' ({trained:,} trained)' * (trained < count)}, {config.model.dtype}",
  ]
  if choice := efficient_attention.describe_implementation(
    config.model, size, device.platform
  ):
    lines.append(f"attention   {choice}")
  lines += [
    *data_lines(experiment),
    f"length      {total_steps:,} steps of {batch:,} images,"
    f" {epochs:,.2f} epochs",
  ]
  if config.optim.ema_decay is not None:
    average = _average(config.optim.ema_decay, total_steps)
    lines.append(f"average     {average}")
  lines.append(
    f"files       {experiment.workdir}: checkpoints/, metrics.jsonl,"
    " tensorboard/"
  )
  if sets := sets_text(experiment):
    lines.append(sets)
  if experiment.data_note:
    lines.append(f"note        {experiment.data_note}")
  reason = unknown_peak(device.device_kind)
  if config.is_partial and device.platform != "cpu":
    reason = "a part of the parameters is frozen"
  if reason:
    lines.append(f"MFU         not shown: {reason}")
  return "\n".join(lines)


def _average(decay: float, total_steps: int) -> str:
  """Returns how many steps the averaged parameters cover at the end."""
  # `optim.ema_weight` of the last step, without a program for it.
  weight = max(1.0 - decay, 9.0 / (9.0 + total_steps))
  text = f"of the parameters of about the last {1 / weight:,.0f} steps"
  if weight > 1.0 - decay:
    text += (
      f"; config.optim.ema_decay={decay:g} is for runs of"
      f" {(10 * decay - 1) / (1 - decay):,.0f} steps or more, and rises to"
      f" {1 - weight:.4f} in this one"
    )
  return text


@dataclasses.dataclass
class _Row:
  """A row of the table of parameters; the fields are its columns."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  blocks: int
  size: int  # parameters of all blocks together


@dataclasses.dataclass
class _RowWithRate(_Row):
  """The same, for parameters with different learning rates."""

  rate: str  # by what it is multiplied, and the layer of its decay


def parameter_table(
  params,
  model: ModelConfig,
  rates: Mapping[str, tuple[np.ndarray, np.ndarray] | None] | None = None,
) -> str:
  """Returns clu's table of parameters; equal blocks share a row.

  Args:
    params: Nested dict of arrays or shapes.
    model: The model of the parameters.
    rates: The result of `optim.rates`; parameters that it lacks are frozen.
      None if all are trained at one rate.
  """
  rows: dict[tuple, _Row] = {}
  of_row: dict[tuple, list] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = model.any_block(path_of(path))
    shape, dtype = tuple(leaf.shape), str(leaf.dtype)
    rate = None if rates is None else rates.get(path_of(path))
    key = name, shape, rate is None
    row = rows.setdefault(key, _Row(name, shape, dtype, 0, 0))
    row.blocks += 1
    row.size += int(np.prod(shape))
    of_row.setdefault(key, []).append(rate)
  if rates is not None:
    rows = {
      key: _RowWithRate(**dataclasses.asdict(row), rate=_rate_text(of_row[key]))
      for key, row in rows.items()
    }
  return parameter_overview.make_table(list(rows.values()))


def _rate_text(rates: list[tuple[np.ndarray, np.ndarray] | None]) -> str:
  """Returns "0.3 (layer 0)", "0.4 to 0.7 (layers 1 to 3)" or "frozen"."""
  if None in rates:
    return "frozen"
  layers, factors = map(np.concatenate, zip(*rates, strict=True))
  ends = lambda x: dict.fromkeys(f"{end:.3g}" for end in (x.min(), x.max()))
  plural = "s" * bool(layers.min() != layers.max())
  return (
    f"{' to '.join(ends(factors))} (layer{plural} {' to '.join(ends(layers))})"
  )
