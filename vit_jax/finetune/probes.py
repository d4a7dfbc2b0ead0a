"""Classifiers on frozen features of a user's images, for `vit-jax evaluate`.

Each probe writes two files to <workdir>/probes, `<kind>_<data set>.json` and
`.npz`. They replace the files of an earlier call. `vit-jax report` shows them:

  json: kind, checkpoint, step, time, dataset, split, note, by (name of the
    classifier of the following values), unit (of a score), l2 (the first is the
    main one), scores (metric -> value), count, num_wrong; classes and
    confusions, as in `per_class`; mistakes with the largest scores: record,
    label, prediction, score, of_label
  npz: image uint8 [mistakes, h, w, 3], in the order of `mistakes`
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import run_summary, weights
from vit_jax.config import Config, ConfigError, EvaluatorConfig
from vit_jax.data import preprocessing
from vit_jax.data.source import Source
from vit_jax.data.sources import Sources
from vit_jax.data.splits import SplitError
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.evaluators.fewshot import few_classes
from vit_jax.evaluators.per_class import confusions, per_class
from vit_jax.inference import pretrained
from vit_jax.models import precision
from vit_jax.options import unexpected
from vit_jax.paths import run_path

FOLDER = "probes"
KINDS = ("fewshot", "linear", "knn")  # kinds of evaluators
# The first of these splits with labels is scored.
SCORED_SPLITS = ("test", "val", "validation")
NUM_MISTAKES = 24  # mistakes that are written with their images
MOST_MISTAKES = 1000  # mistakes that are written


def config_of_file(
  config: Config, path: str, dtype: str | None = None
) -> Config:
  """Returns a config with the model and the preprocessing of a weights file.

  Model and preprocessing are the same as for `vit_jax.load`.

  Args:
    config: All other options.
    path: Published weights.
    dtype: Type of the products, "float32" or "bfloat16". None: the faster one
      (`precision.with_fastest_dtype`); in several processes float32, because
      their machines may differ.

  Raises:
    ConfigError: The file has no model; the type is unknown; or the config sets
      options of the model, which the file decides.
  """
  if dtype not in (None, "float32", "bfloat16"):
    raise ConfigError([unexpected("--dtype", dtype, "float32 or bfloat16")])
  try:
    file = weights.read(path)
    model = weights.identify(file.params, file.options).for_inference()
    if dtype is not None:
      model = dataclasses.replace(model, dtype=dtype)
    elif jax.process_count() == 1:
      model = precision.with_fastest_dtype(model)
    size = weights.trained_at(file)
  except (OSError, ValueError) as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  default = Config()
  decoding = config.data.decoding
  default_ops = preprocessing.with_decoding(default.data.ops, **decoding)
  errors = [
    unexpected(f"config.{key}", "a value", f"none, as {path} states it")
    for key, is_default in (
      ("model", config.model == default.model),
      ("data.ops", config.data.ops == default_ops),
    )
    if not is_default
  ]
  if errors:
    raise ConfigError(errors)
  ops, _ = pretrained.preprocessing(file, size)
  ops = preprocessing.with_decoding(ops, **decoding)
  return dataclasses.replace(
    config, model=model, data=dataclasses.replace(config.data, ops=ops)
  )


def with_probes(
  config: Config, wanted: Mapping[str, str], opened: Sources
) -> Config:
  """Returns the config with the wanted probes as its only evaluators.

  Each probe learns from `train` and scores the first labelled split of
  `SCORED_SPLITS`. There are at most as many shots as images of the rarest
  class, and at most as many neighbours as training images; a line on the
  standard output says which are left out, and why. Other options are taken from
  an evaluator of this kind in the config, if there is one. Images are
  preprocessed as for the other evaluators of the config.

  Args:
    config: Config of the checkpoint.
    wanted: Kind of the evaluator, "fewshot", "linear" or "knn" -> data set.
    opened: Gets the splits that are opened, so that they are opened only once.

  Raises:
    ConfigError: Data sets or splits do not exist or cannot be used; it lists
      all of them.
  """
  evals, errors = [], []
  for kind, dataset in wanted.items():
    try:
      evals.append(_configured(config, kind, dataset, opened))
    except ValueError as e:
      errors.append(f"--{kind}: {e}")
  if errors:
    raise ConfigError(errors)
  return dataclasses.replace(config, evals=tuple(evals))


def _configured(
  config: Config, kind: str, dataset: str, opened: Sources
) -> EvaluatorConfig:
  def has_labels(split: str) -> bool:
    try:
      return bool((opened.inspect(dataset, split).labels() >= 0).any())
    except SplitError:
      return False

  train = opened.inspect(dataset, "train")
  if train.is_regression or train.is_multilabel:
    raise ValueError(f"got {dataset!r}, expected one class per image.")
  labels = train.labels()
  counts = np.bincount(labels[labels >= 0], minlength=train.num_classes)
  fewest = counts.min()
  held_out = next(filter(has_labels, SCORED_SPLITS), None)
  if not held_out or not fewest:
    raise ValueError(
      f"got {dataset!r} with {fewest:,} training images of its rarest class,"
      f" and {held_out or 'no split'} to score; expected 1 or more, and a"
      f" labelled split {' or '.join(SCORED_SPLITS)}."
    )
  cls = EVALUATORS[kind]
  own = (e for e in config.evals if type(e) is cls)
  known = next(own, cls())
  limits: dict[str, Any] = {}
  if kind == "fewshot":
    limits["shots"] = (*(k for k in known.shots if 0 < k <= fewest), 0)
    if left_out := [k for k in known.shots if k > fewest]:
      few = few_classes(counts, min(left_out), train.class_names)
      _say_left_out(kind, "shots", left_out, few)
    limits["baselines"] = False  # raw pixels of all images may need much memory
  elif kind == "knn":
    limits["ks"] = tuple(k for k in known.ks if k <= counts.sum()) or (1,)
    if left_out := [k for k in known.ks if k > counts.sum()]:
      few = f"{counts.sum():,} images to learn from"
      _say_left_out(kind, "neighbours", left_out, few)
  return dataclasses.replace(
    known,
    # The options of the config are for another data set.
    name=kind,
    group=None,
    dataset=dataset,
    train_split="train",
    split=held_out,
    ops=run_summary.eval_ops(config),
    **limits,
  )


def _say_left_out(kind: str, what: str, numbers: list[int], why: str) -> None:
  if jax.process_index() == 0:
    shown = ", ".join(map(str, numbers))
    print(f"{kind:<11} without {shown} {what}: {why}")


def write(
  evaluator: Evaluator, row: Mapping[str, Any], workdir: str
) -> epath.Path | None:
  """Writes the predictions of a probe, in process 0.

  Images are written only if there is one process; one of several reads only a
  part of them.

  Args:
    evaluator: An evaluator that has scored.
    row: The line of evaluation.jsonl.
    workdir: Folder in which `FOLDER` is written.

  Returns:
    The JSON file; None if the evaluator has no `answers`.
  """
  answers, options = evaluator.answers, evaluator.config
  if answers is None or jax.process_index():
    return None
  has_label = answers.label >= 0
  answers = answers._replace(
    **{
      k: v[has_label]
      for k, v in answers._asdict().items()
      if isinstance(v, np.ndarray)
    }
  )
  label, prediction = answers.label, answers.prediction
  source = evaluator.context.sources["split"]
  names = source.class_names or tuple(map(str, range(source.num_classes)))
  wrong = np.flatnonzero(label != prediction)
  wrong = wrong[np.argsort(-answers.score[wrong], kind="stable")]
  prefix = f"{options.name}/"
  values = {
    "kind": options.kind,
    **{k: row[k] for k in ("checkpoint", "step", "time")},
    "dataset": options.dataset,
    "split": options.split,
    "note": evaluator.note,
    "by": answers.by,
    "unit": answers.unit,
    "l2": list(getattr(options, "l2", ())),
    "scores": {
      k.removeprefix(prefix): v
      for k, v in row["scores"].items()
      if k.startswith(prefix)
    },
    "count": len(label),
    "num_wrong": len(wrong),
    "classes": [
      {"name": names[c["class"]], **c} for c in per_class(label, prediction)
    ],
    "confusions": confusions(label, prediction),
    "mistakes": [
      {
        "record": source.record_name(int(answers.index[i])),
        "label": names[label[i]],
        "prediction": names[prediction[i]],
        "score": round(float(answers.score[i]), 4),
        "of_label": round(float(answers.of_label[i]), 4),
      }
      for i in wrong[:MOST_MISTAKES]
    ],
  }
  folder = run_path(workdir) / FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  name = f"{options.kind}_{_slug(options.dataset)}"
  images = folder / f"{name}.npz"
  images.unlink(missing_ok=True)
  file = folder / f"{name}.json"
  file.write_text(json.dumps(values, ensure_ascii=False) + "\n")
  if jax.process_count() == 1 and len(wrong):
    with images.open("wb") as f:
      shown = answers.index[wrong[:NUM_MISTAKES]]
      np.savez_compressed(f, image=_images(evaluator, source, shown))
  return file


def _images(
  evaluator: Evaluator, source: Source, indices: np.ndarray
) -> np.ndarray:
  """Returns the images of records by their indices, uint8 [n, h, w, 3]."""
  batches = list(evaluator.context.batches(source, np.sort(indices)))
  of = {
    index: image
    for batch in batches
    for index, image, counts in zip(
      batch["index"].tolist(), batch["image"], batch["mask"], strict=True
    )
    if counts
  }
  return np.stack([of[i] for i in indices.tolist()])


def _slug(dataset: str) -> str:
  """Returns the name of a data set as a file name."""
  return re.sub(r"[^A-Za-z0-9.-]+", "_", dataset).strip("_.")
