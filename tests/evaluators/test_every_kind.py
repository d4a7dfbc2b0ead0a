"""Each kind of evaluator by command on fake data."""

import pytest
import tiny

from vit_jax import run_checks
from vit_jax.config import cli, defaults, to_dict
from vit_jax.evaluators import EVALUATORS
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics


def get_config():
  """One block of width 32 on ImageNet at 16 px, two steps."""
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=2, model__depth=1)))
  return c


def _config(*args):
  here = f"--config={__file__}"
  parsed = cli.parse("train", {}, [here, "--fake_data", *args])
  assert not parsed.errors
  return parsed.config


# What to add to a command for each kind, and the metrics that it writes.
OF_KIND = {
  "classification": (
    ["dataset=imagenet2012_real", "split=validation"],
    {"top1", "top5", "count"},
  ),
  "subset": (
    ["dataset=imagenet_r", "classes=imagenet_r"],
    {"top1", "balanced_accuracy", "top5", "loss", "count"},
  ),
  "per_class": (
    ["dataset=imagenet_v2/matched-frequency", "split=test"],
    {
      "top1",
      "top5",
      "loss",
      "count",
      "balanced_accuracy",
      "worst_class",
      "smallest_class",
      "ece",
    },
  ),
  "multilabel": (
    ["dataset=imagenet2012_real", "split=validation"],
    {"map", "classes", "count"},
  ),
  "attentive": ([], {"top1", "held_out", "lr", "count"}),
  "rankme": ([], {"rankme", "nearest", "count"}),
  "knn": (["ks=5,1"], {"5nn", "1nn"}),
  "linear": ([], {"top1", "held_out", "lr", "weight_decay", "count"}),
  "segmentation": (
    ["dataset=images:/none", "split=train", "masks=/none", "classes=3"],
    {"miou", "pixel_accuracy"},
  ),
  "fewshot": ([], {"1shot", "5shot", "10shot", "25shot"}),
}


def test_every_kind_is_tested():
  """Also of numbers, which no set of TFDS has to predict."""
  assert {*OF_KIND, "regression"} == set(EVALUATORS)
  for kind, options in EVALUATORS.items():
    assert options().kind == kind


@pytest.mark.nightly
def test_every_kind_by_one_command_on_fake_data(tmp_path):
  """Each as a user adds it to a config that has none of its name."""
  args = []
  for kind, (options, _) in OF_KIND.items():
    own = [f"kind={kind}", "ops=decode|resize(16)", *options]
    if not any(o.startswith("dataset=") for o in own):
      own += ["dataset=cifar10"]
    args += [f"--config.evals.my_{kind}.{o}" for o in own]
  config = _config(*args)
  run_checks.setup(config)
  train_and_evaluate(config, str(tmp_path))
  row = {k: v for r in read_metrics(str(tmp_path)) for k, v in r.items()}
  for kind, (_, metrics) in OF_KIND.items():
    written = {k.split("/", 1)[1] for k in row if k.startswith(f"my_{kind}/")}
    assert written == metrics, kind
  assert (tmp_path / "my_per_class_classes.json").exists()
