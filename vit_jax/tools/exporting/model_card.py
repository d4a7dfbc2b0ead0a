"""Writes the model card of a Hugging Face folder, README.md.

It has what the files of the run state; for weights without a run, what their
file states. Nothing is guessed: a license, for example, is never written.
"""

import dataclasses
import json
import pathlib
import re
from typing import Any, NamedTuple

import yaml
from etils import epath

from vit_jax.checkpointing import checkpointer
from vit_jax.config import EvaluatorConfig, model_from_dict
from vit_jax.inference.pretrained import Pretrained
from vit_jax.paths import is_remote
from vit_jax.tools.reporting import tables
from vit_jax.tools.reporting.runs import Run, short_name
from vit_jax.weights import download
from vit_jax.writers.metric_writer import read_metrics
from vit_jax.zoo.files import hf_classes, hf_preprocessing

# Data set in TFDS -> its other name on the hub.
ON_HUB = {
  "imagenet2012": "ILSVRC/imagenet-1k",
  "cifar10": "uoft-cs/cifar10",
  "cifar100": "uoft-cs/cifar100",
  "mnist": "ylecun/mnist",
}
METRICS = {
  "top1": "top-1 accuracy",
  "top5": "top-5 accuracy",
  "balanced_accuracy": "balanced accuracy, the mean over the classes",
}
FEATURES = {
  "shot": "{}-shot linear accuracy",
  "nn": "{}-nearest-neighbour accuracy",
}
LABELS = {
  "softmax": "softmax",
  **dict.fromkeys(("sigmoid", "bce"), "each class on its own (sigmoid)"),
  "regression": "none: the outputs are numbers",
}


class Score(NamedTuple):
  """A score of a run.

  what: Name of the metric.
  dataset: Name of the data set.
  split: Split that was scored.
  note: Split from which the scored one was held out, or "".
  value: Score, 0 to 1.
  """

  what: str
  dataset: str
  split: str
  note: str
  value: float


def run_of(path: str) -> Run | None:
  """Returns the run of a checkpoint, up to its step; None if it has no run.

  Args:
    path: Path that was loaded: a run, its checkpoints, one step, or another.
  """
  if download.is_remote(path):
    return None
  try:
    folder = checkpointer.find(path)
  except (FileNotFoundError, checkpointer.DamagedError):
    return None
  if not (folder / "metadata").exists():
    return None
  metadata = checkpointer.load_metadata(path)
  if "config" not in metadata:
    return None  # written by convert
  workdir = folder.parent.parent
  rows = read_metrics(str(workdir))
  step = metadata.get("step", 0)
  return Run(
    workdir.name,
    pathlib.Path(workdir),
    metadata["config"],
    metadata,
    [r for r in rows if r["step"] <= step],
  )


def is_as_trained(vit: Pretrained, run: Run) -> bool:
  """Whether the run's scores are also the scores of this model."""
  trained = model_from_dict(run.config["model"]).for_inference()
  return (
    vit.config == trained
    and list(vit.image_size) == run.metadata["image_size"]
    and vit.num_classes == run.metadata["num_classes"]
    and not vit.report.reinitialised
  )


def scores(run: Run) -> list[Score]:
  """Returns accuracies at the checkpoint's step, by evaluator of the config."""
  last = {}
  for row in run.rows:
    if row["step"] == run.metadata.get("step"):
      last |= row
  rows = []
  for name, options in run.evals.items():
    note = "held out of the training data" * run.is_held_out(name)
    dataset = short_name(options.dataset or "")
    for key, value in last.items():
      prefix, _, metric = key.partition("/")
      if prefix == name and (what := _metric_text(metric, options)):
        rows.append(Score(what, dataset, options.split, note, value))
  return rows


def _metric_text(metric: str, options: EvaluatorConfig) -> str | None:
  """Returns the name of a metric; None if it is no accuracy on the split."""
  if count := re.fullmatch(r"(\d+)(shot|nn)", metric):
    return FEATURES[count[2]].format(count[1])
  if metric not in METRICS:
    return None
  text = METRICS[metric]
  if options.kind == "subset":
    return f"{text} among the classes of {options.classes}"
  return text if options.scores_head else f"{text} of a {options.kind} probe"


def text(vit: Pretrained, name: str, is_on_hub: bool = False) -> str:
  """Returns the text of the card.

  Args:
    vit: The model that is written.
    name: Name for loading it in transformers: OWNER/NAME, or the folder.
    is_on_hub: Whether the name is OWNER/NAME on the hub.
  """
  run = run_of(vit.report.path)
  measured = scores(run) if run and is_as_trained(vit, run) else []
  if run and run.is_fake:
    measured = []  # of made-up images
  repository = pathlib.PurePath(name).name
  front = _front(vit, run, measured, repository)
  parts = [
    f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
    f"# {repository}",
    _about(vit, run),
    _use(vit, name, download.HUB if is_on_hub else ""),
  ]
  if measured:
    parts.append(_scores(measured))
  if run:
    parts.append(_training(run, bool(measured)))
  parts.append(_details(vit, bool(measured)))
  return "\n\n".join(parts) + "\n"


def _front(
  vit: Pretrained, run: Run | None, measured: list[Score], name: str
) -> dict[str, Any]:
  """Returns the metadata, with the keys of the hub's ModelCardData."""
  task = (
    "image-classification" if vit.num_classes else "image-feature-extraction"
  )
  front: dict[str, Any] = {
    "library_name": "transformers",
    "pipeline_tag": task,
    "tags": ["vision", "vit", "vit_jax", "jax"],
  }
  sources = [vit.report.path, (run.config.get("init") if run else None) or ""]
  if base := [s for s in sources if s.startswith(download.HUB)]:
    front["base_model"] = base[0].removeprefix(download.HUB).partition("@")[0]
  if run and run.dataset in ON_HUB:
    front["datasets"] = [ON_HUB[run.dataset]]
  if measured:
    front["metrics"] = ["accuracy"]
    results = [_result(task, score) for score in measured]
    front["model-index"] = [{"name": name, "results": results}]
  return front


def _result(task: str, score: Score) -> dict[str, Any]:
  """Returns an entry of the hub's model-index."""
  return {
    "task": {"type": task},
    "dataset": {
      "name": score.dataset,
      "type": ON_HUB.get(score.dataset, score.dataset),
      "split": score.split,
    },
    "metrics": [{"type": "accuracy", "value": score.value, "name": score.what}],
  }


def _about(vit: Pretrained, run: Run | None) -> str:
  height, width = vit.image_size
  head = f"{vit.num_classes:,} classes" if vit.num_classes else "no head"
  origin = (
    "Trained with vit_jax."
    if run
    else f"Converted by vit_jax from {_named(vit.report.path)}."
  )
  num_params = vit.metadata()["num_params"]
  return (
    f"A Vision Transformer, {vit.config.variant}: {num_params:,} parameters,"
    f" images of {height} x {width} pixels, {head}. {origin}"
  )


USE = """## Use

```python
from PIL import Image
from transformers import AutoImageProcessor, {kind}

processor = AutoImageProcessor.from_pretrained({name!r})
model = {kind}.from_pretrained({name!r})
inputs = processor(Image.open("image.jpg"), return_tensors="pt")
{theirs}
```

```python
import vit_jax

vit = vit_jax.load({ours_name!r})
{ours}
```"""
LOGITS = """logits = model(**inputs).logits
print(model.config.id2label[logits.argmax(-1).item()])"""


def _use(vit: Pretrained, name: str, hub: str) -> str:
  kind = hf_classes.class_of(vit.config, bool(vit.num_classes))
  theirs, ours = LOGITS, 'print(vit.predict("image.jpg"))'
  if not vit.num_classes:
    theirs = f"features = model(**inputs).{_output(vit, kind)}"
    ours = "features, _ = vit(images)  # floats in [-1, 1]"
  return USE.format(
    kind=kind, name=name, theirs=theirs, ours=ours, ours_name=hub + name
  )


def _output(vit: Pretrained, kind: str) -> str:
  """Returns the output of a headless class that equals our features."""
  if kind in ("ViTModel", "DeiTModel") and not vit.config.pre_logits:
    return "last_hidden_state[:, 0]"  # its pooler is a tanh layer, untrained
  return {
    "IJepaModel": "last_hidden_state.mean(1)",
    "CLIPVisionModelWithProjection": "image_embeds",
  }.get(kind, "pooler_output")


def _table(head: list[str], rows: list[list[str]]) -> str:
  cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def _scores(measured: list[Score]) -> str:
  rows = [
    [
      s.dataset,
      f"{s.split}, {s.note}" if s.note else s.split,
      s.what,
      f"{100 * s.value:.2f}%",
    ]
    for s in measured
  ]
  return "## Scores\n\n" + _table(["data set", "split", "metric", ""], rows)


def _training(run: Run, has_scores: bool) -> str:
  config = _without_paths(run.config)
  metadata = run.metadata | {"changes": _changes(run)}
  run = dataclasses.replace(run, config=config, metadata=metadata)
  rows = tables.run_facts(run) | tables.cost_texts(run)
  versions = run.metadata.get("versions", {})
  if versions:
    rows["versions"] = ", ".join(f"{k} {v}" for k, v in versions.items())
  if commit := run.metadata.get("commit"):
    rows["commit"] = commit
  note = ""
  if run.is_fake:
    note = "\n\nThe data were fake: images made in memory, to try the program."
  elif not has_scores:
    note = (
      "\n\nThe run's scores are not here: this model was changed since, or its"
      " step was not scored."
    )
  table = _table(["", ""], [[k, v] for k, v in rows.items() if v])
  options = json.dumps(config, indent=2, ensure_ascii=False)
  return (
    f"## Training\n\n{table}{note}\n\n<details><summary>Every option"
    f"</summary>\n\n```json\n{options}\n```\n\n</details>"
  )


def _details(vit: Pretrained, has_scores: bool) -> str:
  _, ops = hf_preprocessing.write(vit.ops, vit.image_size)
  gelu = {
    "tanh": "the tanh form of GELU",
    "erf": "GELU by erf",
    "quick": "quick GELU",
  }
  of_scores = f"; the scores are with `{vit.ops}`" if has_scores else ""
  items = [
    f"preprocessing, by preprocessor_config.json: `{ops}`, then 0 to 255 become"
    f" -1 to 1{of_scores if ops != vit.ops else ''}",
    f"numerics: {gelu[vit.config.gelu]}, {vit.config.ln_eps:g} in LayerNorm;"
    " config.json says so, and the logits of transformers agree up to the"
    " rounding of float32",
  ]
  if vit.num_classes:
    items.append(f"probabilities: {LABELS[vit.loss]}")
  return "## Details\n\n" + "\n".join(f"- {item}" for item in items)


def _named(path: str) -> str:
  """Returns an address unchanged, and of a local path only the last name."""
  is_address = download.is_remote(path) or is_remote(path)
  return path if is_address else epath.Path(path).name


def _without_paths(value: Any, key: str = "") -> Any:
  """Returns a config without the local folders of the run's machine.

  Args:
    value: The config, a section of it, or the value of an option.
    key: Name of the section or option.
  """
  if isinstance(value, dict):
    return {k: _without_paths(v, k) for k, v in value.items()}
  if key == "data_dir":
    return None
  if key == "init" and value:
    return _named(value)
  if key == "dataset" and value:
    prefix, colon, path = value.partition(":")
    return f"{prefix}:{_named(path)}" if colon else prefix
  return value


def _changes(run: Run) -> list[dict[str, Any]]:
  """Returns the changes of a run's options without its machine's folders."""
  return [
    x | {k: _without_paths(x.get(k), option) for k in ("from", "to")}
    for x in run.metadata.get("changes") or ()
    if (option := str(x.get("key")).rpartition(".")[2]) != "data_dir"
  ]
