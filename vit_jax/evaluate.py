"""Runs the evaluators of a config on a checkpoint."""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from vit_jax import (
  experiment,
  run_checks,
  run_summary,
  sharding,
  weights,
)
from vit_jax.config import Config, ConfigError
from vit_jax.data.sources import Sources
from vit_jax.evaluators.evaluator import Evaluator, Params
from vit_jax.paths import FOLDERS, run_path
from vit_jax.writers.metric_writer import SCORES, GroupMeans, format_scores

Row = dict[str, Any]  # result of `record`, a line of evaluation.jsonl


def evaluate(config: Config, path: str) -> dict[str, float]:
  """Runs all evaluators of a config on the parameters of a checkpoint.

  The labels of a data set are matched with the classes of the checkpoint by
  name, see `class_names.match`.

  Args:
    config: Options of the model and of the evaluators.
    path: Weights, as for `vit_jax.load`: the folder of a run or of one step, or
      a published file.

  Returns:
    Name -> value of all metrics, as in training, with baselines.

  Raises:
    ConfigError: The checkpoint is missing or has another model; a data set is
      missing or has other classes; or the config has no evaluator.
    DataError: Records cannot be read, no image of a split has a label, or
      features are not finite.
  """
  return record(config, path)["scores"]


class Ready(NamedTuple):
  """A checkpoint and the evaluators of a config, before they run.

  prepared: Opened and checked data and weights.
  evaluators: The evaluators, in the order of the config.
  params: Parameters on the devices.
  file: Contents of the file of weights.
  report: How the weights were fitted to the model.
  """

  prepared: experiment.Experiment
  evaluators: list[Evaluator]
  params: Params
  file: weights.Weights
  report: weights.Report


def open_checkpoint(
  config: Config,
  path: str,
  workdir: str | None = None,
  opened: Sources | None = None,
  mean: str | None = None,
) -> Ready:
  """Reads a checkpoint and opens the data.

  Args:
    config, path, workdir, opened, mean: See `record`.

  Raises:
    ConfigError: See `evaluate`.
  """
  if not config.evals:
    raise ConfigError(
      [
        "config.evals: got no evaluator, expected one or more; add"
        " --fewshot=DATASET, --linear=DATASET, --knn=DATASET, or"
        " --config.evals.NAME.kind=classification."
      ]
    )
  if config.init == str(path):  # what the config states is of these weights
    mean = mean or config.init_mean
  try:
    file = weights.read(path, mean=mean)
  except (OSError, ValueError) as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  prepared = run_checks.setup(
    config, workdir, scored_weights=file, sources=opened
  )
  mesh = sharding.make_mesh(config.mesh)
  trainer = prepared.trainer(mesh)
  params, report = prepared.fitted_weights()
  params = jax.tree.map(
    lambda new, like: jax.device_put(new, like.sharding),
    params,
    trainer.state.params,
  )
  evaluators = prepared.evaluators(trainer, mesh)
  return Ready(prepared, evaluators, params, file, report)


def record(
  config: Config,
  path: str,
  workdir: str | None = None,
  opened: Sources | None = None,
  mean: str | None = None,
  on_scored: Callable[[Evaluator, Row], None] = lambda *_: None,
) -> Row:
  """Runs all evaluators, and returns the scores and what was scored.

  Args:
    config: See `evaluate`.
    path: See `evaluate`.
    workdir: Folder of evaluation.jsonl, to which a line is added; None: no
      file is written.
    opened: Splits that are already open; None: none.
    mean: Normalisation of the training images, see `weights.read`; None for
      config.init_mean if the weights are those of config.init.
    on_scored: Called for each evaluator with the result, in all processes,
      before it is written.

  Returns:
    checkpoint, its path; step, the number of updates, 0 if unknown; time,
    seconds since 1970; dtype of the model's products; data, evaluator -> text;
    scores.

  Raises:
    ConfigError, DataError: See `evaluate`.
  """
  ready = open_checkpoint(config, path, workdir, opened, mean)
  is_first = jax.process_index() == 0
  if is_first and not ready.file.metadata:  # not a run of vit_jax
    print(weights.format_report(ready.report))
  if is_first and ready.file.metadata and (text := _size_note(ready)):
    print(text)
  if is_first and (text := _images_note(ready)):
    print(text)
  if config.fake_data and is_first:
    print("data are fake (fake_data); --fake_data=false uses real data")
  text = run_summary.sets_text(ready.prepared)  # the same in all processes
  if is_first and text:
    print(text)
  results, step = {}, ready.file.metadata.get("step", 0)
  means = GroupMeans(ready.prepared.evals)
  for evaluator in ready.evaluators:
    if is_first:
      print(f"{evaluator.config.name:<11} {evaluator.note}", flush=True)
    scores = means.add(step, evaluator.run(ready.params))
    if is_first:
      print(format_scores(step, scores), flush=True)
    results |= scores
  row = {
    "checkpoint": str(path),
    "step": step,
    "time": round(time.time(), 3),
    "dtype": config.model.dtype,
    "data": {e.config.name: e.note for e in ready.evaluators},
    "scores": results,
  }
  for evaluator in ready.evaluators:
    on_scored(evaluator, row)
  if workdir is not None and is_first:
    with (run_path(workdir) / SCORES).open("a") as f:
      f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"written     {run_path(workdir) / SCORES}", flush=True)
  return row


def _size_note(ready: Ready) -> str | None:
  """Returns a line if a run was trained on images of another size."""
  trained = weights.trained_at(ready.file)
  scored = ready.prepared.run_shape.image_size
  if trained == scored:
    return None
  return (
    f"the model was trained on images of {trained[0]} x {trained[1]} pixels,"
    f" and is scored on {scored[0]} x {scored[1]}, as config.data.ops has it"
  )


def _images_note(ready: Ready) -> str | None:
  """Returns a line if a folder's split is not what a run was trained on.

  Its other splits may then have images that the run was trained on.
  """
  config, sources = ready.prepared.config, ready.prepared.sources
  dataset, split = config.data.dataset, config.data.split
  metadata = ready.file.metadata
  of_run = metadata.get("config", {}).get("data", {})
  is_same = (dataset, split) == (of_run.get("dataset"), of_run.get("split"))
  scored = [e.name for e in config.evals if e.dataset in (None, dataset)]
  is_folder = dataset.startswith(FOLDERS) and not config.fake_data
  if not (is_same and scored and is_folder):
    return None
  try:
    if sources.inspect(dataset, split).identity() == metadata["data_identity"]:
      return None
  except (KeyError, ValueError):  # an old run; the folder is elsewhere
    return None
  return (
    f"the images of {dataset} [{split}], or their order, are not those that the"
    f" model was trained on: {', '.join(scored)} may have images that it was"
    " trained on"
  )
