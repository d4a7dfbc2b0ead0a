"""Scores a checkpoint: `python -m vit_jax.evaluate --checkpoint=RUN`.

Runs the evaluators of the config that wrote it, or of --config, which
published weights need: --checkpoint=B_16.npz --config=configs/finetune.py:...
With --fewshot=DATASET it measures instead what a linear map of its features
learns from a few examples of that data set, and from all: nothing is trained.
"""

from vit_jax.config import cli

if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  ARGS = cli.parse(
    "vit_jax.evaluate",
    {
      "checkpoint": "run, one of its checkpoints, or published weights",
      "fewshot": "data set (folder:/path, cifar10) to score the features on,"
      " instead of the config's evaluators",
      "workdir": "folder in which a line is added to evaluation.jsonl (default:"
      " the run; runs/<name> for published weights)",
      "json": "print that line, and nothing else on the standard output",
      **cli.PROCESS_FLAGS,
    },
    switches=("json",),
  )

# ruff: noqa: E402
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import evaluators, sharding, weights
from vit_jax import step as step_lib
from vit_jax.batch import DataError
from vit_jax.config import Config, ConfigError, FewshotConfig
from vit_jax.config.preprocessing import image_size
from vit_jax.data import sources
from vit_jax.data.splits import SplitError
from vit_jax.runtime import host_memory, prepare, processes, run_info, startup
from vit_jax.runtime.writer import SCORES

# Of the splits that there are, the first of these is scored.
HELD_OUT = ("test", "val", "validation")


def evaluate(config: Config, path: str) -> dict[str, float]:
  """Runs every evaluator of a config on a checkpoint's parameters.

  Labels of a data set are matched with the checkpoint's classes by name, as
  `weights.match` says.

  Args:
    config: Gives the model and the evaluators.
    path: Weights as `vit_jax.load` takes them: the folder of a run or of one
      step, or a published file.

  Returns:
    All metrics by name, as in training, baselines included.

  Raises:
    ConfigError: The checkpoint is missing or is of another model, a data set
      is missing, or its classes are not those of the checkpoint.
  """
  return record(config, path)["scores"]


def record(
  config: Config, path: str, workdir: str | None = None
) -> dict[str, Any]:
  """As `evaluate`, and says what was scored.

  Args:
    config: See there.
    path: See there.
    workdir: Folder in whose evaluation.jsonl a line is added; None: no file.

  Returns:
    checkpoint (path), step (updates; 0 where nobody knows), time (seconds since
    1970), data (evaluator -> a text) and scores.
  """
  try:
    found = weights.read(path)
    head = weights.Head(weights.num_classes(found.params), found.class_names)
    if not head.num_classes and any(
      e.kind == "classification" for e in config.evals
    ):
      raise ValueError(
        f"got {path!r}, which has no head; expected one, or"
        " --fewshot=<dataset>."
      )
  except (FileNotFoundError, ValueError) as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  prepare.check(config, workdir, head=head)
  mesh = sharding.make_mesh(config.mesh)
  size = image_size(config.data.ops)
  facts = step_lib.Facts(head.num_classes, size)
  assembly = step_lib.assemble(config, facts, mesh)
  abstract = assembly.state.params
  try:
    params, report = weights.adapt(found, abstract, config.model, size)
    if report.reinitialised:
      raise ValueError(
        f"got a head other than {', '.join(report.reinitialised)}; set"
        " config.model.pre_logits as it was trained."
      )
  except ValueError as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  is_first = jax.process_index() == 0
  if is_first and found.format != "checkpoint":
    print(weights.format_report(report))
  params = jax.tree.map(
    lambda new, like: jax.device_put(new, like.sharding), params, abstract
  )
  if config.fake_data and is_first:
    print("data made up (fake_data); --fake_data=false takes the real ones")
  judges = evaluators.build(
    config,
    assembly.predict,
    mesh,
    random_params=assembly.fresh_params,
    head=head,
  )
  results, step = {}, found.metadata.get("step", 0)
  for judge in judges:
    if is_first:
      print(f"{judge.config.name:<11} {judge.note}", flush=True)
    scores = judge.run(params)
    if is_first:
      print(run_info.format_scores(step, scores), flush=True)
    results |= scores
  row = {
    "checkpoint": str(path),
    "step": step,
    "time": round(time.time(), 3),
    "data": {judge.config.name: judge.note for judge in judges},
    "scores": results,
  }
  if workdir is not None and is_first:
    with (epath.Path(workdir) / SCORES).open("a") as f:
      f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"written     {epath.Path(workdir) / SCORES}", flush=True)
  return row


def with_fewshot(config: Config, dataset: str) -> Config:
  """Returns the config with one few-shot evaluator, on that data set.

  It learns from `train`, from the numbers of examples that every class has, and
  from all; and scores the first split of `HELD_OUT`. Its other options are
  those of the config's own few-shot evaluator, if it has one. Images are
  preprocessed as for the config's other evaluators.

  Raises:
    ConfigError: The data set, or one of the splits, is not there.
  """

  def look_at(split: str) -> sources.Source:
    data_dir = config.data.data_dir
    return sources.look_at(dataset, split, data_dir, fake=config.fake_data)

  def is_there(split: str) -> bool:
    try:
      return bool(look_at(split))
    except SplitError:
      return False

  try:
    train = look_at("train")
    held_out = [split for split in HELD_OUT if is_there(split)]
    fewest = np.bincount(train.labels(), minlength=train.num_classes).min()
    if not held_out or not fewest:
      raise ValueError(
        f"got {dataset!r} with {fewest:,} training images of its rarest class"
        f" and {', '.join(held_out) or 'nothing'} to score; expected one or"
        f" more of every class, and a split {', '.join(HELD_OUT)}."
      )
  except ValueError as e:
    raise ConfigError([f"--fewshot: {e}"]) from None
  own = [e for e in config.evals if e.kind == "fewshot"]
  known = [*own, FewshotConfig()][0]
  evaluator = dataclasses.replace(
    known,
    dataset=dataset,
    train_split="train",
    split=held_out[0],
    ops=run_info.eval_ops(config),
    shots=(*(k for k in known.shots if 0 < k <= fewest), 0),
    baselines=False,  # raw pixels of all images can take all memory
  )
  return dataclasses.replace(config, evals=(evaluator,))


def main(args: cli.Args) -> None:
  """Joins the other processes, looks for faults, evaluates."""
  flags = args.flags
  wants_json = flags["json"] == "true"
  try:
    with contextlib.redirect_stdout(sys.stderr if wants_json else sys.stdout):
      processes.initialise(flags, args.faults)
      host_memory.keep()
      startup.use_cache()
      if not flags["checkpoint"]:
        args.faults.append(cli.NO_CHECKPOINT)
      if args.faults:
        raise ConfigError(args.faults)
      path, config = flags["checkpoint"], args.config
      if flags["fewshot"]:
        config = with_fewshot(config, flags["fewshot"])
      name = pathlib.PurePath(path).stem
      workdir = flags["workdir"] or cli.run_of(path) or f"runs/{name}"
      row = record(config, path, str(workdir))
  except (ConfigError, DataError) as e:
    sys.exit(str(e))
  if wants_json and jax.process_index() == 0:
    print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
  main(ARGS)
