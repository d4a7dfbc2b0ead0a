"""Few-shot scores on any mesh, and which labels their processes read."""

import dataclasses

import handmade
import in_memory
import jax
import numpy as np
import pytest
import tiny
from jax.experimental import multihost_utils

from vit_jax import class_names, ridge, sharding
from vit_jax.batch import DataError
from vit_jax.config import FewshotConfig
from vit_jax.data.sources import open_source
from vit_jax.data.tf_cpu import tf
from vit_jax.eval_context import RunContext

RNG = np.random.default_rng(0)
# Features near the corner of their class.
LABELS = np.arange(120) % 10
X = (np.eye(10)[LABELS] + 0.5 * RNG.normal(size=(120, 10))).astype(np.float32)


def options_of(**changes):
  own = {"name": "f", "split": "test[:200]", "l2": (1.0,), "shots": (1, 10)}
  return FewshotConfig(**own | changes)


def evaluator_of(test=120, **changes):
  """Learns from all labels, and scores the first ones."""
  return in_memory.probe(options_of(**changes), LABELS, LABELS[:test], 10)


def test_the_score_is_the_mean_over_draws():
  def score(*seeds):
    evaluator = evaluator_of(shots=(1,), seeds=seeds)
    return evaluator.run({"features": X})["f/1shot"]

  alone = [score(seed) for seed in range(3)]
  assert len({*alone}) > 1
  assert score(0, 1, 2) == pytest.approx(np.mean(alone))


def test_several_penalties_in_any_batch():
  """Each as if alone; 0 shots are all images."""

  def run(*l2s, **changes):
    options = dict(l2=l2s, shots=(0, 2)) | changes
    return evaluator_of(40, **options).run({"features": X})

  scores = run(1.0, 64.0, 0.25)
  assert run(1.0, 64.0, 0.25, batch_size=64) == scores
  want = {}
  for l2, prefix in ((1.0, ""), (64.0, "l2=64/"), (0.25, "l2=0.25/")):
    alone = run(l2)
    want |= {k.replace("f/", f"f/{prefix}"): v for k, v in alone.items()}
    (fit,) = ridge.fit(X, LABELS, 10, [l2])
    assert alone["f/all"] == ridge.accuracy(fit, X[:40], LABELS[:40])
  assert scores == want and len(want) == 6
  assert len(set(scores.values())) > 2  # the penalty does matter


def test_baselines():
  random = RNG.normal(size=(120, 10))
  evaluator = evaluator_of(40, baselines=True)
  evaluator.context = dataclasses.replace(
    evaluator.context, random_params=lambda: {"features": random}
  )
  gathered = evaluator.gather({"features": X})
  # Also in processes that never score: all make the same passes.
  assert set(evaluator.gather({"features": X})) == {""}
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


@pytest.mark.slow
def test_features_on_eight_devices_equal_those_on_one():
  """To 1e-5: float32 (eps 1.2e-7) summed otherwise in some 20 layers."""
  options = options_of(
    dataset="digits",
    ops="decode|resize(16)",
    batch_size=64,
    train_split="train[:200]",
  )
  one = tiny.Parts(tiny.config(), devices=jax.devices()[:1])
  many = tiny.Parts(tiny.config(mesh__fsdp=4))
  params, rows = one.state().params, []
  for p in (one, many):
    context = RunContext(
      options=options,
      config=p.config,
      sources={
        split: open_source("digits", getattr(options, split))
        for split in options.SPLITS
      },
      predict=p.trainer.predict,
      mesh=p.mesh,
      random_params=lambda: params,
      head=class_names.Head(10),
    )
    split = sharding.infer(params, p.mesh, p.config.model)
    rows.append(options.make(context).gather(jax.device_put(params, split))[""])
  for a, b in zip(*rows, strict=True):
    assert a["x"].dtype == np.float32 and a["x"].shape[1] == 32
    np.testing.assert_array_equal(a["index"], b["index"])
    assert (np.diff(a["index"]) > 0).all()
    np.testing.assert_array_equal(a["label"], b["label"])
    np.testing.assert_allclose(a["x"], b["x"], rtol=0, atol=1e-5)


def test_a_class_without_an_image_is_refused_also_the_last():
  options = options_of(shots=(1,), seeds=(0,))
  train, test = handmade.records([0, 1], 3), handmade.records([0, 1, 2])
  sources = {"train_split": train, "split": test}
  out = {"pre_logits": np.zeros((1, 2))}
  (error,) = options.check("f", sources, handmade.NO_HEAD, out)
  assert "f.shots: " in error and "class 2 has 0" in error
  # Of files whose labels are read when they are needed, then.
  evaluator = in_memory.evaluator(options, sources)
  with pytest.raises(DataError, match=r"f\.shots: .*class 2 has 0"):
    evaluator.gather({"features": np.zeros((3, 2), np.float32)})


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
  source.read.clear()
  context = handmade.context(options_of(), {"split": source})
  mine = []
  monkeypatch.setattr(jax, "process_count", lambda: count)
  for i in range(count):
    gather = lambda x: mine.append(x) or np.stack([x] * count)
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    context.labels(source)
  assert sorted(source.read) == [0, 1, 2]  # each by one process
  gather = lambda x: np.stack(mine)
  monkeypatch.setattr(multihost_utils, "process_allgather", gather)
  np.testing.assert_array_equal(context.labels(source), labels)
