"""Scores files of weights on sets of images, and shows published scores."""

import argparse
import dataclasses
import re
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax import evaluate, malloc, missing_data, run_checks, weights
from vit_jax.batch import DataError
from vit_jax.callbacks import startup
from vit_jax.config import Config, ConfigError, DataConfig
from vit_jax.data import pixels
from vit_jax.data.preprocessing import image_size
from vit_jax.data.sources import Sources
from vit_jax.distributed import exit_codes, processes
from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.families import ModelConfig
from vit_jax.objectives import Classification
from vit_jax.options import unexpected
from vit_jax.tools.scoring import published_scores
from vit_jax.tools.scoring.published_scores import (
  AVAILABLE,
  SETS,
  SOURCES,
  Published,
  Set,
)
from vit_jax.weights import eval_preprocessing
from vit_jax.writers import atomic_files, run_info

RESULT = "score.json"
TIMM_SHARE = 0.9  # crop / shorter side of a ViT below 384 pixels


class Task(NamedTuple):
  """A file and how it is scored.

  path: The file.
  config: Config with its model, and an evaluator for each set.
  names: Name of an evaluator -> name of its set in --on.
  protocol: Text about the preprocessing.
  published: Rows of its published scores; the first one is shown.
  """

  path: str
  config: Config
  names: dict[str, str]
  protocol: str
  published: tuple[Published, ...]


def sets_of(text: str, opened: Sources) -> dict[str, Set]:
  """Returns name in --on -> set of images.

  Raises:
    ConfigError: Names are neither a set nor a data set with a split (it lists
      all of them); or `available` is given and no set is on disk.
  """
  sets, errors = {}, []
  for name in dict.fromkeys(part.strip() for part in text.split(",")):
    match = re.fullmatch(r"(.+?)\[(.+)\]", name)
    if name == AVAILABLE:
      here = {k: opened.is_on_disk(*s[:2]) for k, s in SETS.items()}
      missing_data.agree(opened.data_dir, here)
      sets |= {k: s for k, s in SETS.items() if here[k]}
      if not any(here.values()):
        errors.append(f"--on={name}: none of {', '.join(SETS)} is on disk.")
    elif name in SETS:
      sets[name] = SETS[name]
    elif match:
      sets[name] = Set(match[1], match[2])
    else:
      expected = (
        f"{', '.join(SETS)}, {AVAILABLE}, or a data set with its split, such as"
        " digits[test]"
      )
      errors.append(unexpected("--on", repr(name), expected))
  if errors:
    raise ConfigError(errors)
  return sets


def task_of(
  path: str,
  sets: dict[str, Set],
  *,
  by: str = "auto",
  dtype: str = "float32",
  batch_size: int = 128,
  data_dir: str | None = None,
  fake_data: bool = False,
) -> tuple[Task, weights.Weights]:
  """Returns the task of a file, and the contents of the file.

  Args:
    path: As for `vit_jax.load`.
    sets: Name -> set of images.
    by: Protocol, see `choose_protocol`.
    dtype: Type of the matrix products.
    batch_size: Images per batch, over all devices.
    data_dir: Folder of TFDS's data.
    fake_data: Whether to use fake records, two batches of each set.

  Raises:
    FileNotFoundError: There is no file.
    ValueError: The file has no model with a head, or does not state the
      requested preprocessing.
  """
  file = weights.read(path)
  model = weights.identify(file.params, file.options).for_inference()
  num_classes = weights.num_classes(file.params, model)
  if not num_classes:
    raise ValueError(f"{path}: got weights without a head; see --fewshot.")
  model = dataclasses.replace(model, dtype=dtype)
  size = weights.trained_at(file)
  published = published_scores.find(path, size, num_classes)
  kind, ops = choose_protocol(file, model, size, by, published)
  # Publishers ignore the EXIF orientation; a run of vit_jax is scored as it was
  # trained, with the orientation applied.
  scored = (
    ops if file.format == "checkpoint" else eval_preprocessing.as_stored(ops)
  )
  note = ""
  if file.format == "timm" and file.ops is None:
    note = " (no config.json beside it: mean and deviation 0.5)"
  # A published score with the same protocol comes first.
  published = tuple(sorted(published, key=lambda row: row.ops != ops))
  names = {name.replace("/", " "): name for name in sets}
  config = Config(
    fake_data=fake_data,
    model=model,
    objective=Classification(loss=file.loss or "softmax"),
    data=DataConfig(ops=ops, batch_size=batch_size, data_dir=data_dir),
    evals=tuple(
      _evaluator(name, sets[written], scored) for name, written in names.items()
    ),
  )
  return Task(path, config, names, f"{kind}: {ops}{note}", published), file


def choose_protocol(
  file: weights.Weights,
  model: ModelConfig,
  size: tuple[int, int],
  protocol: str,
  published: tuple[Published, ...],
) -> tuple[str, str]:
  """Returns the protocol with which a file is scored, and its operations.

  "auto" takes the preprocessing that the file states. If it states none, "auto"
  takes the protocol of the first published score. Without a published score the
  format decides: "timm" for timm's names, "big_vision" for Google's names
  without a class token, and "google" for all others. The crop of timm is 0.9 of
  the shorter side, and 1.0 from 384 pixels, unless a published row states
  another share.

  Args:
    file: The file of weights.
    model: Options of its model.
    size: (height, width) of its images, pixels.
    protocol: "own", "timm", "google", "big_vision" or "auto".
    published: Published scores of the file.

  Raises:
    ValueError: The protocol is "own", and the file states none; or the
      published model has another normalisation than [-1, 1], which the file
      does not state.
  """
  own = file.ops
  if own and (image_size(own) != size or pixels.is_random(own)):
    own = None  # a run without evaluation has random operations
  if protocol == "own" and not own:
    expected = f"timm, google or big_vision, as {file.path} states none"
    raise ValueError(unexpected("--protocol", "own", expected))
  if file.ops is None and any(row.mean != "0.5" for row in published):
    raise ValueError(
      f"{file.path}: got no config.json beside it, expected one with the mean"
      f" and deviation of timm's {published[0].name}."
    )
  if own and protocol in ("auto", "own"):
    return "own", own
  if protocol == "auto":
    if published:
      protocol = published[0].protocol
    elif file.format == "timm":
      protocol = "timm"
    elif model.pool not in (None, "token"):
      protocol = "big_vision"
    else:
      protocol = "google"
  shares = [row.share for row in published if row.share]
  share = next(iter(shares), TIMM_SHARE if min(size) < 384 else 1.0)
  return protocol, eval_preprocessing.of_protocol(protocol, size, share).ops


def _evaluator(name: str, images: Set, ops: str) -> EvaluatorConfig:
  kind = "subset" if images.classes else "classification"
  options = {"classes": images.classes} if images.classes else {}
  return EVALUATORS[kind](
    name=name,
    kind=kind,
    dataset=images.dataset,
    split=images.split,
    ops=ops,
    **options,
  )


def _in_flags(error: str, task: Task) -> str:
  """Returns an error of a config, in terms of the flags of this command."""
  for name, written in task.names.items():
    for option in ("dataset", "split"):
      error = error.replace(f"config.evals.{name}.{option}", f"--on={written}")
  error = error.replace("config.data.batch_size", "--batch_size")
  return error.replace("--checkpoint:", f"{task.path}:")


def rows_of(task: Task, opened: Sources) -> list[dict[str, Any]]:
  """Scores a file on its sets; returns a row of the table for each set.

  Scores are in percent; unknown values are None.
  """
  scores = evaluate.record(task.config, task.path, opened=opened)["scores"]
  rows = []
  for name, written in task.names.items():
    top1, top5, count = (
      scores[f"{name}/{key}"] for key in ("top1", "top5", "count")
    )
    is_real = not task.config.fake_data
    known = [row for row in task.published if is_real and written in row.top1]
    row = known[0] if known else None
    rows.append(
      {
        "file": published_scores.name_of(task.path),
        "on": written,
        "images": int(count),
        "top1": 100 * top1,
        "top5": 100 * top5,
        "published_top1": row and row.top1[written],
        "published_top5": row and row.top5.get(written),
        "difference": row and 100 * top1 - row.top1[written],
        "source": row and SOURCES[row.source],
        "same_pixels": row and row.ops == task.config.data.ops,
        "model": weights.describe(task.config.model),
        "protocol": task.protocol,
      }
    )
  return rows


def _tasks(args: argparse.Namespace, opened: Sources) -> list[Task]:
  """Returns the task of each file.

  Raises:
    ConfigError: Files or sets are missing or do not fit; it lists all of them.
  """
  sets = sets_of(args.on, opened)
  tasks, errors = [], []
  for path in dict.fromkeys(args.files):
    try:
      task, file = task_of(
        path,
        sets,
        by=args.protocol,
        dtype=args.dtype,
        batch_size=args.batch_size,
        data_dir=args.data_dir,
        fake_data=args.fake_data,
      )
    except (OSError, ValueError) as e:
      errors.append(str(e))
      continue
    try:
      run_checks.setup(task.config, scored_weights=file, sources=opened)
    except ConfigError as e:
      errors += [_in_flags(error, task) for error in e.errors]
    tasks.append(task)
  if errors:
    raise ConfigError(dict.fromkeys(errors))
  return tasks


def run(args: argparse.Namespace) -> dict[str, Any]:
  """Scores all files on all sets, and writes score.json after each file.

  Raises:
    ConfigError: Files or sets are missing or do not fit; it lists all of them.
      It is raised before anything is scored.
  """
  opened = Sources(args.data_dir, fake=args.fake_data)
  tasks = _tasks(args, opened)
  is_first = jax.process_index() == 0
  result: dict[str, Any] = {"scores": [], "versions": run_info.versions()}
  folder = epath.Path(args.workdir)
  try:
    with atomic_files.os_errors(folder):
      folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ConfigError([atomic_files.folder_error(args.workdir, e)]) from None
  names = [published_scores.name_of(task.path) for task in tasks]
  for task in tasks:
    if is_first:
      print(f"\n{'file':<16}{task.path}")
      print(f"{'model':<16}{weights.describe(task.config.model)}")
      print(f"{'preprocessing':<16}{task.protocol}", flush=True)
    rows = rows_of(task, opened)
    for row in rows:
      if names.count(row["file"]) > 1:  # as final, of two searches
        row["file"] = task.path
    result["scores"] += rows
    run_info.write_json(str(folder), RESULT, result)
  if is_first:
    print(f"\n{scores_table(result['scores'])}")
    print(f"\nwritten: {folder / RESULT}")
  return result


def scores_table(rows: list[dict[str, Any]]) -> str:
  """Returns a table of the measured and the published scores."""
  lines = [
    (
      *("file", "on", "images", "top-1", "top-5"),
      *("published", "", "difference", "source"),
    )
  ]
  for row in rows:
    source = row["source"] or "no published score known by this name"
    if row["source"] and not row["same_pixels"]:
      source += " (other preprocessing)"
    lines.append(
      (
        row["file"],
        row["on"],
        f"{row['images']:,}",
        *(
          _percent(row[key])
          for key in ("top1", "top5", "published_top1", "published_top5")
        ),
        "" if row["difference"] is None else f"{row['difference']:+.2f}",
        source,
      )
    )
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  names = 0, 1, 8  # columns that are aligned left
  return "\n".join(
    "  ".join(
      f"{cell:<{w}}" if i in names else f"{cell:>{w}}"
      for i, (cell, w) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )


def _percent(value: float | None) -> str:
  return "" if value is None else f"{value:.2f}"


def main(args: argparse.Namespace) -> None:
  """Joins the other processes, scores the files and prints the tables."""
  try:
    processes.initialise(vars(args))
    malloc.reuse_freed_memory()
    startup.use_cache()
    # By default, float32 products have less precision on some chips.
    with jax.default_matmul_precision("highest"):
      run(args)
  except (ConfigError, DataError, atomic_files.WriteError) as e:
    exit_codes.refuse(str(e))
