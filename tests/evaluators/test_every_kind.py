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


SUBSET = "top1 balanced_accuracy top5 loss count"
# What to add to a command for each kind, and the metrics that it writes.
OF_KIND = {
  "classification": (
    "dataset=imagenet2012_real split=validation", "top1 top5 count",
  ),
  "subset": ("dataset=imagenet_r classes=imagenet_r", SUBSET),
  "per_class": (
    "dataset=imagenet_v2/matched-frequency split=test",
    f"{SUBSET} worst_class smallest_class ece",
  ),
  "multilabel": (
    "dataset=imagenet2012_real split=validation", "map classes count",
  ),
  "attentive": ("dataset=cifar10", "top1 held_out lr count"),
  "rankme": ("dataset=cifar10", "rankme nearest count"),
  "knn": ("dataset=cifar10 ks=5,1", "5nn 1nn"),
  "linear": ("dataset=cifar10", "top1 held_out lr weight_decay count"),
  "segmentation": (
    "dataset=images:/none split=train masks=/none classes=3",
    "miou pixel_accuracy",
  ),
  "fewshot": ("dataset=cifar10", "1shot 5shot 10shot 25shot"),
}  # fmt: skip


def test_every_kind_is_tested():
  """Also of numbers, which no set of TFDS has to predict."""
  assert {*OF_KIND, "regression"} == set(EVALUATORS)
  for kind, options in EVALUATORS.items():
    assert options().kind == kind


@pytest.mark.nightly
def test_every_kind_by_one_command_on_fake_data(tmp_path):
  """Each as a user adds it to a config that has none of its name."""
  args = [f"--config={__file__}", "--fake_data"]
  for kind, (options, _) in OF_KIND.items():
    for own in (f"kind={kind}", "ops=decode|resize(16)", *options.split()):
      args.append(f"--config.evals.my_{kind}.{own}")
  parsed = cli.parse("train", {}, args)
  assert not parsed.errors
  run_checks.setup(parsed.config)
  train_and_evaluate(parsed.config, str(tmp_path))
  row = {k: v for r in read_metrics(str(tmp_path)) for k, v in r.items()}
  for kind, (_, metrics) in OF_KIND.items():
    written = {k.split("/", 1)[1] for k in row if k.startswith(f"my_{kind}/")}
    assert written == {*metrics.split()}, kind
  assert (tmp_path / "my_per_class_classes.json").exists()
