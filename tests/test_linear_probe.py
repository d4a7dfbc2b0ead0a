"""The linear probe from which fine-tuning starts."""

import dataclasses
import json

import numpy as np
import pytest
from jax.experimental import multihost_utils

import vit_jax
from vit_jax import linear_probe, ridge
from vit_jax.config import ConfigError, defaults, freeze
from vit_jax.train import train_and_evaluate
from vit_jax.writers.fine_tuning import ProbeOutcome
from vit_jax.writers.metric_writer import read_metrics


@pytest.fixture(scope="module")
def clusters():
  """Noisy features of three classes, to learn from and to choose by."""
  rng = np.random.default_rng(0)
  centers = 3.0 * rng.normal(size=(3, 5)) + 10.0
  labels = np.arange(60) % 3
  features = centers[labels] + rng.normal(size=(60, 5))
  return features[:45], labels[:45], features[45:], labels[45:]


def test_it_says_where_few_images_choose(clusters):
  probe = linear_probe.fit(*clusters, num_classes=3)
  text = "of the 15 held-out images right (one image is 6.7%: too few for a"
  assert text in str(probe)
  assert "too few" not in str(dataclasses.replace(probe, num_held_out=50))


def test_its_logits_are_the_scaled_scores_of_ridge(clusters):
  features, labels, held_out, _ = clusters
  probe = linear_probe.fit(*clusters, num_classes=3)
  (fitted,) = ridge.fit(features, labels, 3, [probe.l2])
  _, best, _ = ridge.scores(fitted, held_out, np.zeros(15, int))
  logits = held_out @ probe.kernel + probe.bias
  # The head is float32; features of 10 lose one digit where they cancel.
  np.testing.assert_allclose(
    logits.max(-1), probe.scale * best, rtol=1e-4, atol=1e-4
  )
  assert (logits.argmax(-1) == ridge.predict(fitted, held_out)).all()


def test_penalty_and_scale_are_the_best_on_what_is_held_out(clusters):
  features, labels, held_out, held_out_labels = clusters
  probe = linear_probe.fit(*clusters, num_classes=3)
  accuracies = [
    ridge.accuracy(fitted, held_out, held_out_labels)
    for fitted in ridge.fit(features, labels, 3, linear_probe.L2S)
  ]
  assert probe.accuracy == max(accuracies)
  logits = held_out @ probe.kernel + probe.bias

  def loss(factor):
    x = factor * logits
    of_label = x[np.arange(15), held_out_labels]
    return np.mean(np.log(np.exp(x - x.max()).sum(-1)) + x.max() - of_label)

  np.testing.assert_allclose(probe.loss, loss(1.0), rtol=1e-5)
  assert probe.loss <= min(loss(0.5), loss(2.0))


def test_an_image_counts_by_the_weight_of_its_class(clusters):
  """Held-out images of a class of weight 0 choose nothing."""
  features, labels, held_out, held_out_labels = clusters
  of_class = np.array([1.0, 3.0, 0.0])
  counts = held_out_labels < 2
  probe = linear_probe.fit(*clusters, 3, of_class)
  noise = np.where(counts[:, None], held_out, 1e3)
  same = linear_probe.fit(features, labels, noise, held_out_labels, 3, of_class)
  assert (probe.l2, probe.scale) == (same.l2, same.scale)
  np.testing.assert_array_equal(probe.kernel, same.kernel)
  (fitted,) = ridge.fit(features, labels, 3, [probe.l2], of_class)
  _, best, _ = ridge.scores(fitted, held_out, np.zeros(15, int))
  logits = held_out @ probe.kernel + probe.bias
  np.testing.assert_allclose(
    logits.max(-1), probe.scale * best, rtol=1e-4, atol=1e-4
  )


@pytest.mark.slow
def test_balanced_accuracies_decide_where_classes_have_weights(tmp_path):
  c = config(name="sgd", lr=100.0, momentum=0.0)
  c.objective.class_weights = "balanced"
  train_and_evaluate(freeze(c), str(tmp_path))
  outcome = json.loads((tmp_path / "linear_probe.json").read_text())
  last = [r for r in read_metrics(str(tmp_path)) if "val/top1" in r][-1]
  assert outcome["balanced"] == last["val/balanced_accuracy"]
  assert outcome["balanced"] > outcome["fine_tuned_balanced"]


def config(**optim):
  c = defaults()
  c.model.variant, c.model.depth = "Ti/8", 1
  c.data.dataset, c.data.split = "digits", "train[:300]"
  c.data.ops, c.data.batch_size = "decode|resize(16)", 48
  c.total_steps, c.log_steps = 2, 2
  c.init_head = "linear_probe"
  c.optim.update(optim)
  ops = {"kind": "classification", "ops": c.data.ops}
  c.evals = {"val": {**ops, "split": "train[300:500]", "every_steps": 1}}
  return c


def rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  scores = {}
  for row in map(json.loads, lines):
    if "val/top1" in row:
      scores[row["step"]] = row["val/top1"]
  return scores


@pytest.mark.parametrize(
  "is_distilled",
  [
    pytest.param(False, marks=pytest.mark.slow),
    pytest.param(True, marks=pytest.mark.nightly),
  ],
)
def test_a_run_starts_from_it(is_distilled, tmp_path, monkeypatch):
  """Its score is the first row; a rate of 0 keeps it; it is a model, too."""
  (tmp_path / "probe").mkdir()  # of a run that ended before its checkpoint
  barriers = []
  monkeypatch.setattr(
    multihost_utils,
    "sync_global_devices",
    lambda name: barriers.append((name, (tmp_path / "probe").exists())),
  )
  c = config(lr=1e-9)
  if is_distilled:
    c.model.name, c.model.distilled = "modern", True
  state = train_and_evaluate(freeze(c), str(tmp_path))
  assert ("probe removed", False) in barriers  # before any process writes
  scores = rows(tmp_path)
  assert scores[0] == scores[1] == scores[2] > 0.3  # one of ten classes: 0.1
  outcome = json.loads((tmp_path / "linear_probe.json").read_text())
  assert scores[0] == pytest.approx(outcome["top1"], abs=0.005)  # one image
  vit = vit_jax.load(str(tmp_path / "probe"), verbose=False)
  # Two updates of at most 1e-9, and what float32 rounds.
  np.testing.assert_allclose(
    vit.params["head"]["kernel"],
    state.params["head"]["kernel"],
    rtol=2e-7,
    atol=3e-9,
  )


@pytest.mark.slow
def test_what_fine_tuning_spoils_is_not_kept(tmp_path):
  state = train_and_evaluate(
    freeze(config(name="sgd", lr=100.0, momentum=0.0)), str(tmp_path)
  )
  scores = rows(tmp_path)
  assert scores[1] < scores[0] == scores[2]
  vit = vit_jax.load(str(tmp_path / "probe"), verbose=False)
  np.testing.assert_array_equal(
    vit.params["head"]["kernel"], state.params["head"]["kernel"]
  )


def test_it_needs_images_to_choose_by(tmp_path):
  c = config()
  c.evals = {}
  with pytest.raises(ConfigError, match="expected an evaluator `val`"):
    train_and_evaluate(freeze(c), str(tmp_path))


def test_the_saved_model_is_the_better_one():
  assert ProbeOutcome(0.9, fine_tuned=0.8).is_saved
  assert not ProbeOutcome(0.9, fine_tuned=0.9).is_saved
  assert not ProbeOutcome(0.9).is_saved  # training goes on
  balanced = ProbeOutcome(
    0.9, fine_tuned=0.8, balanced=0.5, fine_tuned_balanced=0.7
  )
  assert not balanced.is_saved
