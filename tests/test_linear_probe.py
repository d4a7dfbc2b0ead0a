"""The linear probe from which fine-tuning starts."""

import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import vit_jax
from vit_jax import linear_probe, ridge
from vit_jax.checkpointing.checkpointer import write_params
from vit_jax.config import ConfigError, defaults, freeze
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.step import TrainState
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
  assert outcome["saved_balanced"] == last["val/balanced_accuracy"]
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


class HeldOut(Evaluator):
  """Stands for the evaluator `val`: a peak of the accuracy, and a plateau."""

  config = types.SimpleNamespace(name="val")

  def __init__(self, peak, plateau=0.0, class_weights="none", count=1000):
    objective = types.SimpleNamespace(counts_classes=class_weights != "none")
    self.context = types.SimpleNamespace(
      config=types.SimpleNamespace(objective=objective)
    )
    self.peak, self.plateau, self.count = peak, plateau, count

  def run(self, params):
    # The probe is 1, the fine-tuned model 3.
    weight = (float(params["head"]["kernel"][0]) - 1) / 2
    accuracy = 1 - max(self.plateau, abs(weight - self.peak))
    return {
      "val/top1": accuracy,
      "val/balanced_accuracy": 1 - accuracy,
      "val/count": self.count,
    }


def best(tmp_path, evaluator, fine_tuned=3.0, ema=None):
  """Returns what `linear_probe.best` saves: params, ema, outcome, text."""
  of = lambda x: {"head": {"kernel": jnp.full(2, x)}}
  write_params(str(tmp_path / "probe"), of(1.0), {})
  (tmp_path / "linear_probe.json").write_text('{"top1": 0.5, "l2": 4.0}')
  state = TrainState(
    0, of(fine_tuned), None, ema=None if ema is None else of(ema)
  )
  state, text = linear_probe.best(str(tmp_path), [evaluator], state)
  outcome = json.loads((tmp_path / "linear_probe.json").read_text())
  value = lambda tree: tree["head"]["kernel"].tolist()
  averages = None if state.ema is None else value(state.ema)
  return value(state.params), averages, outcome, text


@pytest.mark.parametrize(
  ("peak", "weight", "text"),
  [
    (-1.0, 0.0, "the linear probe: top-1 0.00% on held-out images, fine-"),
    (0.3, 0.25, "the mean of fine-tuned model (25%) and linear probe (75%): "),
    (0.5, 0.5, "the mean of fine-tuned model (50%) and linear probe (50%): "),
    (2.0, 1.0, "the fine-tuned model: top-1 0.00% on held-out images, linear"),
  ],
)
def test_the_saved_mean_is_the_best_on_what_is_held_out(
  peak, weight, text, tmp_path
):
  params, _, outcome, line = best(tmp_path, HeldOut(peak))
  assert params == [1 + 2 * weight] * 2
  assert (outcome["weight"], outcome["l2"]) == (weight, 4.0)
  assert outcome["saved"] == pytest.approx(1 - abs(weight - peak))
  assert outcome["fine_tuned"] == pytest.approx(1 - abs(1 - peak))
  assert outcome["balanced"] is None
  assert line.startswith(text)


@pytest.mark.parametrize(
  ("peak", "plateau", "count", "weight"),
  [
    (0.75, 0.3, 1000, 0.5),  # equal: 0.5 to 1
    (1.0, 0.0, 4, 0.75),  # 0.75 is one image of 4 worse
    (1.0, 0.0, 2, 0.5),  # 0.5 is one image of 2 worse
    (1.0, 0.0, 20, 1.0),  # 0.75 is five images worse
    (0.0, 0.0, 2, 0.0),  # 0.5 is one image of 2 worse than the probe
  ],
)
def test_one_image_does_not_outweigh_a_mean_near_the_middle(
  peak, plateau, count, weight, tmp_path
):
  _, _, outcome, _ = best(tmp_path, HeldOut(peak, plateau, count=count))
  assert outcome["weight"] == weight


def test_the_running_average_is_what_counts_and_what_is_replaced(tmp_path):
  params, ema, _, _ = best(tmp_path, HeldOut(0.5), fine_tuned=9.0, ema=3.0)
  assert params == ema == [2.0, 2.0]


def test_the_probe_is_saved_unchanged_if_training_diverged(tmp_path):
  class OfNaN(HeldOut):
    def run(self, params):
      is_finite = bool(jnp.isfinite(params["head"]["kernel"]).all())
      return {"val/top1": 0.5 if is_finite else 0.1, "val/count": 1000}

  params, *_ = best(tmp_path, OfNaN(0.0), fine_tuned=float("nan"))
  assert params == [1.0, 1.0]


def test_balanced_accuracy_decides_if_classes_have_weights(tmp_path):
  evaluator = HeldOut(0.0, class_weights="balanced")
  _, _, outcome, text = best(tmp_path, evaluator)
  assert outcome["weight"] == 1.0  # top-1 is best at 0
  names = ("balanced", "fine_tuned_balanced", "saved_balanced")
  assert [outcome[n] for n in names] == [0.0, 1.0, 1.0]
  assert text.endswith("; balanced accuracy 100.00%, linear probe 0.00%")


def test_during_training_nothing_is_saved():
  assert ProbeOutcome(0.9).saved_model is None
