"""The linear probe from which fine-tuning starts."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from faults import runs
from jax.experimental import multihost_utils

import vit_jax
from vit_jax import ridge
from vit_jax.checkpointing.checkpointer import write_params
from vit_jax.config import ConfigError
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.finetune import linear_probe, lora
from vit_jax.step import TrainState
from vit_jax.train import train_and_evaluate


@pytest.fixture(scope="module")
def clusters():
  """Noisy features of three classes, to learn from and to choose by."""
  rng = np.random.default_rng(0)
  centers = 3.0 * rng.normal(size=(3, 5)) + 10.0
  labels = np.arange(60) % 3
  features = centers[labels] + rng.normal(size=(60, 5))
  return features[:45], labels[:45], features[45:], labels[45:]


def test_penalty_and_scale_are_the_best_on_what_is_held_out(clusters):
  """Its logits are the scaled scores of ridge."""
  features, labels, held_out, held_out_labels = clusters
  probe = linear_probe.fit(*clusters, num_classes=3)
  (fitted,) = ridge.fit(features, labels, 3, [probe.l2])
  _, best, _ = ridge.scores(fitted, held_out, np.zeros(15, int))
  logits = held_out @ probe.kernel + probe.bias
  # The head is float32; features of 10 lose one digit where they cancel.
  np.testing.assert_allclose(
    logits.max(-1), probe.scale * best, rtol=1e-4, atol=1e-4
  )
  assert (logits.argmax(-1) == ridge.predict(fitted, held_out)).all()
  accuracies = [
    ridge.accuracy(model, held_out, held_out_labels)
    for model in ridge.fit(features, labels, 3, linear_probe.L2S)
  ]
  assert probe.accuracy == max(accuracies)

  def loss(factor):
    x = factor * logits
    targets = (15 * np.eye(3)[held_out_labels] + 1 / 3) / 16
    x = x - x.max()
    return np.mean(np.log(np.exp(x).sum(-1)) - (targets * x).sum(-1))

  np.testing.assert_allclose(probe.loss, loss(1.0), rtol=1e-5)
  assert probe.loss <= min(loss(0.5), loss(2.0))


def test_held_out_images_of_a_class_of_weight_0_choose_nothing(clusters):
  features, labels, held_out, held_out_labels = clusters
  of_class = np.array([1.0, 3.0, 0.0])
  noise = np.where(held_out_labels[:, None] < 2, held_out, 1e3)
  probe, same = (
    linear_probe.fit(features, labels, x, held_out_labels, 3, of_class)
    for x in (held_out, noise)
  )
  assert (probe.l2, probe.scale) == (same.l2, same.scale)
  np.testing.assert_array_equal(probe.kernel, same.kernel)


def test_a_head_that_is_always_right_keeps_its_doubts():
  """Its probability of the label is (m + 1/2) / (m + 1), with two classes."""
  of = lambda n: (np.tile([[-1.0], [1.0]], (n // 2, 1)), np.arange(n) % 2)
  num = 200
  probe = linear_probe.fit(*of(40), *of(num), num_classes=2)
  assert probe.accuracy == 1
  ((left, right),) = np.array([[1.0]]) @ probe.kernel + probe.bias
  # p = 1 / (1 + exp(-margin)); the scale is a power of 2.
  assert 2**-0.5 < (right - left) / np.log(2 * num + 1) < 2**0.5


VAL = {
  "kind": "classification",
  "ops": "decode|resize(16)",
  "split": "train[300:500]",
  "every_steps": 1,
}


def config(**changes):
  own = dict(
    total_steps=2,
    init_head="linear_probe",
    data__dataset="digits",
    data__split="train[:300]",
    data__batch_size=48,
    evals={"val": VAL},
  )
  return tiny.config(**own | changes)


def run(c, workdir):
  """Returns the state, the score by step, and the model of the probe alone."""
  state = train_and_evaluate(c, str(workdir))
  scores = {
    r["step"]: r["val/top1"] for r in runs.rows(workdir) if "val/top1" in r
  }
  return state, scores, vit_jax.load(workdir / "probe", verbose=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
  "model", [{}, dict(model__name="modern", model__distilled=True)]
)
def test_a_run_starts_from_it(model, tmp_path, monkeypatch):
  """Its score is the first row; a rate of 0 keeps it; it is a model, too."""
  (tmp_path / "probe").mkdir()  # of a run that ended before its checkpoint
  barriers = []
  monkeypatch.setattr(
    multihost_utils,
    "sync_global_devices",
    lambda name: barriers.append((name, (tmp_path / "probe").exists())),
  )
  state, scores, vit = run(config(optim__lr=1e-9, **model), tmp_path)
  assert ("probe removed", False) in barriers  # before any process writes
  assert scores[0] == scores[1] == scores[2] > 0.3  # one of ten classes: 0.1
  outcome = json.loads((tmp_path / "linear_probe.json").read_text())
  assert scores[0] == pytest.approx(outcome["top1"], abs=0.005)  # one image
  # Two updates of at most 1e-9, and what float32 rounds.
  np.testing.assert_allclose(
    vit.params["head"]["kernel"],
    state.params["head"]["kernel"],
    rtol=2e-7,
    atol=3e-9,
  )


@pytest.mark.nightly
def test_what_fine_tuning_spoils_is_not_kept(tmp_path):
  sgd = dict(optim__name="sgd", optim__lr=100.0, optim__momentum=0.0)
  state, scores, vit = run(config(**sgd, optim__clip_norm=None), tmp_path)
  assert scores[1] < scores[0] == scores[2]
  np.testing.assert_array_equal(
    vit.params["head"]["kernel"], state.params["head"]["kernel"]
  )


def test_it_needs_images_to_choose_by(tmp_path):
  with pytest.raises(ConfigError, match="val"):
    train_and_evaluate(config(evals={}), str(tmp_path))


def best(
  workdir, is_right, fine_tuned=3.0, ema=None, labels=None, is_weighted=False
):
  """Returns what `linear_probe.best` saves: parameters, outcome.

  Args:
    workdir: Folder of the run.
    is_right: Weight of the fine-tuned model -> which held-out images are right.
      The probe is 1, the fine-tuned model 3.
    fine_tuned: The parameters after the training.
    ema: Their running average.
    labels: Classes of the held-out images; None: one class.
    is_weighted: Whether the loss has weights of classes.
  """

  def hits(params):
    right = is_right((float(params["head"]["kernel"][0]) - 1) / 2)
    return {"is_right": right, "label": 0 * right if labels is None else labels}

  of = types.SimpleNamespace
  objective = of(counts_classes=is_weighted)
  context = of(config=of(objective=objective))
  val = Evaluator.__new__(Evaluator)
  vars(val).update(config=of(name="val"), context=context, hits=hits)
  model = lambda x: {"head": {"kernel": jnp.full(2, x)}}
  write_params(str(workdir / "probe"), model(1.0), {})
  (workdir / "linear_probe.json").write_text('{"top1": 0.5, "l2": 4.0}')
  averages = {} if ema is None else {"ema": model(ema)}
  state = TrainState(0, model(fine_tuned), None, averages=averages)
  state, text = linear_probe.best(str(workdir), [val], state)
  outcome = json.loads((workdir / "linear_probe.json").read_text())
  assert f"{100 * outcome['saved']:.2f}%" in text
  params = state.params["head"]["kernel"].tolist()
  for average in state.averages.values():
    assert average["head"]["kernel"].tolist() == params
  return params, outcome


@pytest.mark.parametrize(
  "at, weight, averages",
  [
    (-0.5, 0.0, {}),
    (0.3, 0.25, {}),
    (1.5, 1.0, {}),
    (0.5, 0.5, dict(fine_tuned=9.0, ema=3.0)),  # it counts, and is replaced
  ],
)
def test_the_saved_mean_is_the_best_on_what_is_held_out(
  at, weight, averages, tmp_path
):
  share = lambda w: max(0, 1 - abs(w - at))
  is_right = lambda w: np.arange(1000) < 1000 * share(w)
  params, outcome = best(tmp_path, is_right, **averages)
  assert params == [1 + 2 * weight] * 2
  assert (outcome["weight"], outcome["l2"]) == (weight, 4.0)
  for name, of in (("saved", weight), ("fine_tuned", 1)):
    assert outcome[name] == pytest.approx(share(of), abs=0.0011)  # one image
  assert outcome["balanced"] is None


def test_the_probe_is_saved_unchanged_if_training_diverged(tmp_path):
  def is_right(weight):  # a prediction of NaN is wrong
    return np.arange(9) < (weight == 0) * 5

  params, _ = best(tmp_path, is_right, fine_tuned=float("nan"))
  assert params == [1.0, 1.0]


def test_balanced_accuracy_decides_if_classes_have_weights(tmp_path):
  labels = np.repeat([0, 1], [90, 10])

  def is_right(weight):  # only the fine-tuned model knows the rare class
    return np.arange(100) >= 20 if weight == 1 else labels == 0

  _, outcome = best(tmp_path, is_right, labels=labels)
  assert outcome["weight"] == 0.5
  (again := tmp_path / "again").mkdir()
  _, outcome = best(again, is_right, labels=labels, is_weighted=True)
  assert outcome["weight"] == 1.0
  names = ("balanced", "fine_tuned_balanced", "saved_balanced")
  values = [0.5, 8 / 9, 8 / 9]
  np.testing.assert_allclose([outcome[n] for n in names], values, rtol=1e-6)


def test_the_standard_error_is_that_of_a_paired_difference():
  """Of shares s and differences d it is sqrt(sum (s d)^2)."""
  rng = np.random.default_rng(0)
  chosen = set()
  for _ in range(100):
    shares = rng.dirichlet(np.ones(40))
    is_right = rng.random((5, 40)) < rng.uniform(0.5, 0.8, (5, 1))

    def is_worse(one, other, shares=shares):
      d = other.astype(float) - one
      return d @ shares > np.sqrt(sum((shares * d) ** 2))

    left = {
      weight
      for weight, one in zip(linear_probe.WEIGHTS, is_right, strict=True)
      if not any(is_worse(one, other) for other in is_right)
    }
    nearest = next(w for w in (0.5, 0.75, 0.25, 1.0, 0.0) if w in left)
    assert linear_probe.choose(is_right, shares) == nearest
    chosen.add(nearest)
  assert chosen == {*linear_probe.WEIGHTS}


def test_a_mean_of_models_with_adapters_is_the_mean_of_their_kernels():
  """B of the probe is 0, so the mean of A B has the fine-tuned A."""
  rng = np.random.default_rng(0)
  kernel, a, tuned_a, tuned_b = (
    rng.normal(size=s) for s in ((6, 4), (6, 2), (6, 2), (2, 4))
  )

  def state(a, b, head):
    block = {"query": {"lora_a": a, "lora_b": b}}
    return TrainState(0, {"block": block, "head": {"kernel": head}}, None)

  of = lambda s: lora.merged(kernel, *s.params["block"]["query"].values(), 2.0)
  begun = state(a, 0 * tuned_b, np.ones(3))
  tuned = state(tuned_a, tuned_b, np.full(3, 3.0))
  for weight in linear_probe.WEIGHTS:
    mean = linear_probe._mean(begun, tuned, weight)
    expected = (1 - weight) * of(begun) + weight * of(tuned)
    np.testing.assert_allclose(of(mean), expected, rtol=1e-12)
    np.testing.assert_allclose(mean.params["head"]["kernel"], 1 + 2 * weight)
