"""Scores over whole splits, whatever the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import evaluators, losses, step
from vit_jax.config import ClassificationConfig, FewshotConfig
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import open_source

OPS = "decode|resize(16)"


@pytest.fixture(scope="module")
def parts():
  return tiny.Parts(tiny.config())


@pytest.fixture(scope="module")
def params(parts):
  """A head that is not zero, so that predictions differ."""
  params = parts.state().params
  head = params["head"]["kernel"]
  head = jax.random.normal(jax.random.key(1), head.shape)
  return {**params, "head": {**params["head"], "kernel": head}}


def _judge(parts, config):
  config_all = parts.config.__class__(
    **{**vars(parts.config), "evals": (config,)}
  )
  (judge,) = evaluators.build(
    config_all,
    step.make_predict(parts.model),
    parts.mesh,
    random_params=lambda: parts.state().params,
  )
  return judge


def _classification(batch_size):
  return ClassificationConfig(
    name="v",
    dataset="digits",
    split="test[:101]",
    ops=OPS,
    batch_size=batch_size,
  )


@pytest.fixture(scope="module")
def by_hand(parts, params):
  """Logits and labels of the 101 examples in one batch."""
  source = open_source("digits", "test[:101]")
  (batch,) = eval_batches(source, OPS, batch_size=101)
  logits, _ = jax.jit(step.make_predict(parts.model))(params, batch["image"])
  return np.asarray(logits), batch["label"]


@pytest.mark.parametrize("batch_size", [8, 104])
def test_every_example_counts_once(parts, params, by_hand, batch_size):
  scores = _judge(parts, _classification(batch_size)).run(params)
  logits, label = by_hand
  order = np.argsort(-logits, axis=1)
  assert scores["v/count"] == 101
  assert scores["v/top1"] == pytest.approx(np.mean(order[:, 0] == label))
  top5 = np.mean([l in o[:5] for l, o in zip(label, order, strict=True)])
  assert scores["v/top5"] == pytest.approx(top5)
  loss = losses.softmax_xent(jnp.asarray(logits), jnp.eye(10)[label])
  assert scores["v/loss"] == pytest.approx(float(loss.mean()), rel=1e-6)


def test_predictions_are_those_of_the_model(parts, params, by_hand):
  logits, label = by_hand
  rows = _judge(parts, _classification(16)).predictions(params, 20)
  np.testing.assert_array_equal(rows["label"], label[:20])
  np.testing.assert_array_equal(rows["prediction"], logits[:20].argmax(-1))
  assert rows["image"].shape == (20, 16, 16, 3)


def _fewshot(**changes):
  return FewshotConfig(
    **{
      "name": "f",
      "dataset": "digits",
      "train_split": "train",
      "split": "test[:200]",
      "ops": OPS,
      "batch_size": 64,
      "l2": 1.0,
      "shots": (1, 10),
      **changes,
    }
  )


def test_fewshot_beside_its_baselines(parts, params):
  judge = _judge(parts, _fewshot(baselines=True))
  scores = judge.run(params)
  assert set(scores) == {
    f"f/{b}{k}shot"
    for b in ("", "random_init/", "raw_pixels/")
    for k in (1, 10)
  }
  # The head plays no part: the features are those of random weights.
  assert scores["f/10shot"] == scores["f/random_init/10shot"]
  assert 0.7 < scores["f/raw_pixels/10shot"] < 0.95
  assert scores["f/raw_pixels/1shot"] < scores["f/raw_pixels/10shot"]


def test_fewshot_is_the_same_in_any_batch(parts, params):
  small = _judge(parts, _fewshot(batch_size=8, shots=(5,))).run(params)
  large = _judge(parts, _fewshot(batch_size=200, shots=(5,))).run(params)
  # Features differ in the last place only; an example or two may flip.
  assert small["f/5shot"] == pytest.approx(large["f/5shot"], abs=2 / 200)


def test_unknown_layer_lists_the_known(parts, params):
  judge = _judge(parts, _fewshot(layer="prelogits"))
  with pytest.raises(ValueError, match="got 'prelogits'.*pre_logits"):
    judge.run(params)


def test_every_kind_has_an_evaluator():
  from vit_jax.config import EVALUATOR_CONFIGS

  assert evaluators.EVALUATORS.keys() == EVALUATOR_CONFIGS.keys()
