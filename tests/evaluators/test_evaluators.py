"""Scores over whole splits, whatever the batch, mesh or thread."""

import dataclasses
import functools

import handmade
import in_memory
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
import tiny
from jax.experimental import multihost_utils

from vit_jax import class_names, losses, ridge, sharding
from vit_jax.batch import DataError
from vit_jax.config import ClassificationConfig, FewshotConfig
from vit_jax.data.sources import open_source
from vit_jax.data.tf_cpu import tf
from vit_jax.eval_context import RunContext
from vit_jax.evaluators import classification
from vit_jax.evaluators.features import extract, features_fn

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, 101)
LOGITS = RNG.normal(0, 3, (101, 10)).astype(np.float32)
PARAMS = {"logits": LOGITS}
ANSWERS = {
  "image": np.stack([np.arange(101), *[0 * np.arange(101)] * 2], 1),
  "label": LABELS,
  "prediction": LOGITS.argmax(-1),
  "probability": np.asarray(jax.nn.softmax(LOGITS)).max(-1),
}


@functools.cache
def _classification(batch_size=8, loss="softmax"):
  """Of 101 images; batches of 8 leave five for the last one."""
  options = ClassificationConfig(name="v", split="test", batch_size=batch_size)
  source = handmade.records(LABELS, 10)
  context = handmade.context(options, source, 10, objective__loss=loss)
  return options.make(context)


@pytest.mark.parametrize("batch_size", [8, 104])
def test_every_example_counts_once(batch_size):
  scores = _classification(batch_size).run(PARAMS)
  order = np.argsort(-LOGITS, axis=1)
  assert scores["v/count"] == 101
  assert scores["v/top1"] == pytest.approx(np.mean(order[:, 0] == LABELS))
  top5 = np.mean([l in o[:5] for l, o in zip(LABELS, order, strict=True)])
  assert scores["v/top5"] == pytest.approx(top5)
  recall = sklearn.metrics.balanced_accuracy_score(LABELS, order[:, 0])
  assert scores["v/balanced_accuracy"] == pytest.approx(recall, rel=1e-12)
  loss = losses.softmax_xent(jnp.asarray(LOGITS), jnp.eye(10)[LABELS])
  assert scores["v/loss"] == pytest.approx(float(loss.mean()), rel=1e-6)


def test_hits_are_those_of_every_image_in_order():
  """Without the three rows that fill the last batch."""
  hits = _classification().hits(PARAMS)
  expected = {
    "index": np.arange(101),
    "label": LABELS,
    "prediction": ANSWERS["prediction"],
    "is_right": ANSWERS["prediction"] == LABELS,
  }
  assert hits.keys() == expected.keys()
  for key, values in expected.items():
    np.testing.assert_array_equal(hits[key], values)


@pytest.mark.parametrize(("limit", "num_mistakes"), [(20, 7), (500, 500)])
def test_predictions_and_worst_mistakes(limit, num_mistakes):
  rows = _classification().predictions(PARAMS, limit, num_mistakes)
  wrong = np.flatnonzero(ANSWERS["prediction"] != LABELS)
  worst = wrong[np.argsort(-ANSWERS["probability"][wrong])][:num_mistakes]
  assert 7 < len(wrong) < 101
  for kind in ("", "mistake_"):  # every pixel of an image is the same
    rows[kind + "image"] = rows[kind + "image"][:, 0, 0]
  for key, values in ANSWERS.items():
    close = {"rtol": 1e-5 if key == "probability" else 0}
    np.testing.assert_allclose(rows[key], values[:limit], **close)
    np.testing.assert_allclose(rows["mistake_" + key], values[worst], **close)
  assert rows["num_images"] == 101 and rows["num_wrong"] == len(wrong)
  assert rows["dataset"] == "handmade" and rows["split"] == "test"
  assert len(rows) == 12


def test_what_is_a_mistake():
  several = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]], np.float32)
  wrong = classification.is_mistake(several, np.array([2, 2, 0]))
  assert wrong.tolist() == [False, True, False]  # the last has no label


def test_a_sigmoid_has_probabilities_of_its_own():
  rows = _classification(loss="sigmoid").predictions(PARAMS, 20, 0)
  best = LOGITS[:20].astype(np.float64).max(-1)
  np.testing.assert_allclose(
    rows["probability"], 1 / (1 + np.exp(-best)), rtol=1e-6
  )


def _fewshot(train=None, test=None, **changes):
  """Options; or the evaluator of records with these labels."""
  own = {"name": "f", "split": "test[:200]", "l2": (1.0,), "shots": (1, 10)}
  options = FewshotConfig(**own | changes)
  if train is None:
    return options
  return in_memory.probe(options, train, test, 10)


def _clusters(num):
  """Features near the corner of their class, and the labels."""
  labels = np.arange(num) % 10
  noise = RNG.normal(size=(num, 10))
  return (np.eye(10)[labels] + 0.5 * noise).astype(np.float32), labels


def test_fewshot_is_the_mean_over_its_draws():
  x, labels = _clusters(120)

  def score(*seeds):
    evaluator = _fewshot(labels, labels, shots=(1,), seeds=seeds)
    return evaluator.run({"features": x})["f/1shot"]

  alone = [score(seed) for seed in range(3)]
  assert len({*alone}) > 1
  assert score(0, 1, 2) == pytest.approx(np.mean(alone))


def test_fewshot_of_several_penalties_in_any_batch():
  """Each as if alone."""
  x, labels = _clusters(60)

  def run(*l2s, **changes):
    options = dict(l2=l2s, shots=(0, 2)) | changes
    return _fewshot(labels, labels[:40], **options).run({"features": x})

  scores = run(1.0, 64.0, 0.25)
  assert run(1.0, 64.0, 0.25, batch_size=64) == scores
  want = {}
  for l2, prefix in ((1.0, ""), (64.0, "l2=64/"), (0.25, "l2=0.25/")):
    alone = run(l2)
    want |= {k.replace("f/", f"f/{prefix}"): v for k, v in alone.items()}
  assert scores == want and len(want) == 6
  assert len(set(scores.values())) > 2  # the penalty does matter


def test_shots_of_0_are_all_examples():
  """The map that `ridge.fit` finds for the whole split."""
  x, labels = _clusters(40)
  evaluator = _fewshot(labels, labels[:24], shots=(4, 0))
  scores = evaluator.run({"features": x})
  (fit,) = ridge.fit(x, labels, 10, [1.0])
  want = ridge.accuracy(fit, x[:24], labels[:24])
  # Four of each class are all, too.
  assert scores == {"f/4shot": want, "f/all": want}


def test_fewshot_beside_its_baselines():
  (x, labels), random = _clusters(120), RNG.normal(size=(120, 10))
  evaluator = _fewshot(labels, labels[:40], baselines=True)
  evaluator.context = dataclasses.replace(
    evaluator.context, random_params=lambda: {"features": random}
  )
  gathered = evaluator.gather({"features": x})
  # Also in processes that never score: all make the same passes.
  assert set(evaluator.gather({"features": x})) == {""}
  pixels = gathered["raw_pixels/"][1]["x"].reshape(40, 4, 4, 3)
  grey = np.tile(np.arange(40)[:, None, None], (1, 4, 4)) / 127.5 - 1
  np.testing.assert_allclose(pixels[..., 0], grey, atol=1e-6)
  scores = evaluator.score(gathered)
  assert set(scores) == {
    f"f/{b}{k}shot"
    for b in ("", "random_init/", "raw_pixels/")
    for k in (1, 10)
  }
  assert scores["f/10shot"] > scores["f/random_init/10shot"] + 0.3
  # They are scored once.
  assert scores == evaluator.score({"": gathered[""]})


def _of_digits(parts, **changes):
  options = _fewshot(
    dataset="digits", ops="decode|resize(16)", batch_size=64, **changes
  )
  return options.make(
    RunContext(
      options=options,
      config=parts.config,
      sources={
        split: open_source("digits", getattr(options, split))
        for split in options.SPLITS
      },
      predict=parts.trainer.predict,
      mesh=parts.mesh,
      random_params=lambda: parts.state().params,
      head=class_names.Head(10),
    )
  )


@pytest.mark.slow
def test_features_on_eight_devices_equal_those_on_one():
  """To 1e-5: float32 (eps 1.2e-7) summed otherwise in some 20 layers."""
  one = tiny.Parts(tiny.config(), devices=jax.devices()[:1])
  many = tiny.Parts(tiny.config(mesh__fsdp=4))
  params, rows = one.state().params, []
  for p in (one, many):
    evaluator = _of_digits(p, train_split="train[:200]", shots=(5,))
    here = jax.device_put(
      params, sharding.infer(params, p.mesh, p.config.model)
    )
    rows.append(evaluator.gather(here)[""])
  for a, b in zip(*rows, strict=True):
    assert a["x"].dtype == np.float32 and a["x"].shape[1] == 32
    np.testing.assert_array_equal(a["index"], b["index"])
    assert (np.diff(a["index"]) > 0).all()
    np.testing.assert_array_equal(a["label"], b["label"])
    np.testing.assert_allclose(a["x"], b["x"], rtol=0, atol=1e-5)


def test_a_batch_is_dispatched_before_the_one_before_is_fetched():
  events = []

  class Result:
    def __init__(self, i):
      self.i = i

    def copy_to_host_async(self):
      events.append(f"copy {self.i}")

    def __array__(self, *_, **__):
      events.append(f"fetch {self.i}")
      return np.float32(self.i)

  def fn(params, batch):
    i = next(params["numbers"])
    events.append(f"run {i}")
    return Result(i)

  batches = [tiny.batch(i, tiny.config()) for i in range(3)]
  forward = _classification().context.forward
  assert [*forward(fn, {"numbers": iter(range(3))}, batches)] == [0, 1, 2]
  order = [*dict.fromkeys(events)]
  assert order.index("copy 0") < order.index("run 1") < order.index("fetch 0")
  assert order.index("run 2") < order.index("fetch 1")
  assert not [*forward(fn, {}, [])]


def test_a_class_without_an_image_is_refused_also_the_last():
  options = _fewshot(shots=(1,), seeds=(0,))
  sources = {
    "train_split": handmade.records([0, 1], 3),
    "split": handmade.records([0, 1, 2]),
  }
  (error,) = options.check(
    "f", sources, handmade.NO_HEAD, {"pre_logits": np.zeros((1, 2))}
  )
  assert "f.shots: " in error and "class 2 has 0" in error
  # Of files whose labels are read when they are needed, then.
  evaluator = in_memory.evaluator(options, sources)
  with pytest.raises(DataError, match=r"f\.shots: .*class 2 has 0"):
    evaluator.gather({"features": np.zeros((3, 2), np.float32)})


def test_features_that_are_not_finite_are_refused():
  """Their scores would be plausible: an image of NaN is class 0.

  The data are named, which are not those of the evaluator for a linear probe
  before the training.
  """
  options = ClassificationConfig(name="val")
  train = handmade.records([0, 1], name="to learn")
  context = in_memory.evaluator(options, handmade.records([0, 1]), 2).context
  fn = features_fn(context, ("pre_logits",))
  table = np.array([[0.0], [np.inf]], np.float32)
  with pytest.raises(DataError, match=r"val: .*'to learn'.* 1 of 2 images"):
    extract(context, train, fn, {"features": table})
  none = handmade.records([-1, -1], 2)
  with pytest.raises(DataError, match="val: .* no image has a label"):
    extract(context, none, fn, {"features": table})


class InFiles(handmade.Records):
  """Labels that are known when they are read; `read` has their numbers."""

  knows_labels = False
  read: list = []

  def load(self, raw):
    record = super().load(raw)
    keep = lambda i: self.read.append(int(i)) or i
    index = tf.numpy_function(keep, [record["index"]], tf.int64)
    return {**record, "index": tf.ensure_shape(index, [])}


@pytest.mark.parametrize(
  "count, is_regression", [(2, False), (4, True)], ids=["few", "many"]
)
def test_processes_share_the_reading_of_labels(
  monkeypatch, count, is_regression
):
  """More processes than records, too; -1 stays -1."""
  labels = np.arange(3) - 1
  values = vars(handmade.records(labels, num_classes=9))
  if is_regression:
    labels = np.stack([labels, -labels / 2], 1).astype(np.float32)
    values |= {"table": labels, "num_classes": 2, "is_regression": True}
  source = InFiles(**values)
  context = handmade.context(_fewshot(), {"split": source})
  mine = []
  monkeypatch.setattr(jax, "process_count", lambda: count)
  for i in range(count):
    gather = lambda x: mine.append(x) or np.stack([x] * count)
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    context.labels(source)
  assert sorted(source.read) == [0, 1, 2]  # each by one process
  source.read.clear()
  gather = lambda x: np.stack(mine)
  monkeypatch.setattr(multihost_utils, "process_allgather", gather)
  np.testing.assert_array_equal(context.labels(source), labels)
  source.read.clear()
