"""Each kind of evaluator: by command on fake data, with wrong options."""

import handmade
import in_memory
import numpy as np
import pytest
import tiny

from vit_jax import run_checks
from vit_jax.config import cli, defaults, to_dict
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig
from vit_jax.self_supervised.attentive_probe import AttentiveConfig
from vit_jax.self_supervised.rankme import RankMeConfig
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


# Options, and parts of their errors.
WRONG = [
  (KnnConfig(ks=(3,)), []),
  (
    KnnConfig(ks=(0, 11), layer="x"),
    ["ks: got (0, 11)", "layer: got 'x'", "got 11 neighbours"],
  ),
  (RankMeConfig(), []),
  (
    RankMeConfig(max_images=1, layer="x"),
    ["max_images: got 1", "layer: got 'x'"],
  ),
  (LinearConfig(layers=("cls*2", "encoded")), []),
  (LinearConfig(lrs=(0.1, 0.0), steps=0), ["lrs: got", "steps: got"]),
  (
    LinearConfig(weight_decays=(), seed=-1),
    ["weight_decays: got", "seed: got"],
  ),
  (LinearConfig(layer="x"), ["layer: got"]),
  (LinearConfig(train_ops="decode|resize(4)"), ["whiten: got True"]),
  (LinearConfig(layers=("pre_logits", "cls")), ["2, cls of 32"]),
  (AttentiveConfig(), []),
  (
    AttentiveConfig(lrs=(0.1, 0.0), weight_decay=-1.0, steps=0, seed=-1),
    ["lrs: got", "weight_decay: got", "steps: got", "seed: got"],
  ),
]


@pytest.mark.parametrize("options, parts", WRONG)
def test_errors_name_their_options(options, parts):
  source = handmade.records(np.arange(10) % 2)
  out = {"pre_logits": np.zeros((1, 2)), "encoded": np.zeros((1, 5, 32))}
  errors = in_memory.errors(options, source, **out)
  assert len(errors) == len(parts), errors
  assert all(any(part in e for e in errors) for part in parts), errors


def test_what_probes_cannot_learn_from():
  """Too few images, no tokens, and more tokens than fit into memory."""
  few, source = (handmade.records(np.arange(n) % 2) for n in (9, 10))
  vector, tokens = {"pre_logits": np.zeros((1, 2))}, np.zeros((1, 5, 32))
  for options in (LinearConfig(), AttentiveConfig()):
    (error,) = in_memory.errors(options, few, encoded=tokens, **vector)
    assert "train_split: got 9" in error
  (error,) = in_memory.errors(AttentiveConfig(), source, **vector)
  assert "no tokens" in error
  large = np.broadcast_to(np.float32(0), (1, 10**4, 10**5))
  (error,) = in_memory.errors(AttentiveConfig(), source, encoded=large)
  assert "train_ops: got None" in error and "19 GiB" in error
  anew = AttentiveConfig(train_ops="decode|resize(4)")
  assert not in_memory.errors(anew, source, encoded=large)
