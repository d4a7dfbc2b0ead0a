"""Scores over whole splits, whatever the batch, mesh or thread."""

import doctest
import re

import handmade
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
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import open_source
from vit_jax.data.tf_cpu import tf
from vit_jax.eval_context import RunContext
from vit_jax.evaluators import EVALUATORS, classification
from vit_jax.evaluators.features import extract, features_fn
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig

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


def _evaluator(parts, options, names=None):
  return options.make(
    RunContext(
      options=options,
      config=parts.config,
      sources={
        split: open_source(options.dataset, getattr(options, split))
        for split in options.SPLITS
      },
      predict=parts.trainer.predict,
      mesh=parts.mesh,
      random_params=lambda: parts.state().params,
      head=class_names.Head(10, names),
    )
  )


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
  logits, _ = jax.jit(parts.trainer.predict)(params, batch["image"])
  return np.asarray(logits), batch["label"]


@pytest.mark.parametrize(
  "batch_size", [104, pytest.param(8, marks=pytest.mark.slow)]
)
def test_every_example_counts_once(parts, params, by_hand, batch_size):
  scores = _evaluator(parts, _classification(batch_size)).run(params)
  logits, label = by_hand
  order = np.argsort(-logits, axis=1)
  assert scores["v/count"] == 101
  assert scores["v/top1"] == pytest.approx(np.mean(order[:, 0] == label))
  top5 = np.mean([l in o[:5] for l, o in zip(label, order, strict=True)])
  assert scores["v/top5"] == pytest.approx(top5)
  recall = sklearn.metrics.balanced_accuracy_score(label, order[:, 0])
  assert scores["v/balanced_accuracy"] == pytest.approx(recall, rel=1e-12)
  loss = losses.softmax_xent(jnp.asarray(logits), jnp.eye(10)[label])
  assert scores["v/loss"] == pytest.approx(float(loss.mean()), rel=1e-6)


def test_hits_are_those_of_every_image_in_order(parts, params, by_hand):
  """Without the three rows that fill the last batch."""
  logits, label = by_hand
  hits = _evaluator(parts, _classification(8)).hits(params)
  prediction = logits.argmax(-1)
  expected = {
    "index": np.arange(101),
    "label": label,
    "prediction": prediction,
    "is_right": prediction == label,
  }
  assert hits.keys() == expected.keys()
  for key, values in expected.items():
    np.testing.assert_array_equal(hits[key], values)


@pytest.mark.slow
def test_the_order_of_the_heads_classes_is_no_matter(parts, params, by_hand):
  """Columns and their names permuted alike: the same scores, to the bit."""
  order = np.random.default_rng(0).permutation(10)
  head = {k: v[..., order] for k, v in params["head"].items()}
  names = tuple(str(i) for i in order)
  config = _classification(16)
  evaluator = _evaluator(parts, config, names)
  scores = evaluator.run({**params, "head": head})
  assert evaluator.note.endswith("10 classes, matched by name; another order")
  want = _evaluator(parts, config).run(params)
  # The loss sums ten terms in another order.
  assert scores.pop("v/loss") == pytest.approx(want.pop("v/loss"), rel=1e-6)
  assert scores == want
  # Without the names, labels meet the columns of others.
  assert _evaluator(parts, config).run({**params, "head": head}) != want
  rows = evaluator.predictions({**params, "head": head}, 20, 0)
  np.testing.assert_array_equal(order[rows["label"]], by_hand[1][:20])


@pytest.mark.parametrize(
  "batch_size", [16, pytest.param(104, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("limit", "num_mistakes"), [(20, 7), (500, 500)])
def test_predictions_and_worst_mistakes(
  parts, params, by_hand, batch_size, limit, num_mistakes
):
  logits, label = by_hand
  (batch,) = eval_batches(
    open_source("digits", "test[:101]"), OPS, batch_size=101
  )
  evaluator = _evaluator(parts, _classification(batch_size))
  rows = evaluator.predictions(params, limit, num_mistakes)
  answers = {
    "image": batch["image"],
    "label": label,
    "prediction": logits.argmax(-1),
    "probability": np.asarray(jax.nn.softmax(logits)).max(-1),
  }
  wrong = np.flatnonzero(answers["prediction"] != label)
  worst = wrong[np.argsort(-answers["probability"][wrong])][:num_mistakes]
  assert 7 < len(wrong) < 101
  for key, values in answers.items():
    close = {"rtol": 1e-5 if key == "probability" else 0}
    np.testing.assert_allclose(rows[key], values[:limit], **close)
    np.testing.assert_allclose(rows["mistake_" + key], values[worst], **close)
  assert rows["num_images"] == 101 and rows["num_wrong"] == len(wrong)
  assert rows["dataset"] == "digits" and rows["split"] == "test[:101]"
  assert len(rows) == 12


def test_what_is_a_mistake():
  assert doctest.testmod(classification).failed == 0
  several = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]], np.float32)
  wrong = classification.is_mistake(several, np.array([2, 2, 0]))
  assert wrong.tolist() == [False, True, False]  # the last has no label


def test_a_sigmoid_has_probabilities_of_its_own(params, by_hand):
  parts = tiny.Parts(tiny.config(objective__loss="sigmoid"))
  rows = _evaluator(parts, _classification(16)).predictions(params, 20, 0)
  best = by_hand[0][:20].astype(np.float64).max(-1)
  # Logits reach some tens, and float32 rounds at 6e-8 of them.
  np.testing.assert_allclose(
    rows["probability"], 1 / (1 + np.exp(-best)), rtol=1e-5
  )


def _fewshot(**changes):
  return FewshotConfig(
    **{
      "name": "f",
      "dataset": "digits",
      "train_split": "train",
      "split": "test[:200]",
      "ops": OPS,
      "batch_size": 64,
      "l2": (1.0,),
      "shots": (1, 10),
      **changes,
    }
  )


@pytest.mark.slow
def test_fewshot_beside_its_baselines(parts, params):
  evaluator = _evaluator(parts, _fewshot(baselines=True))
  gathered = evaluator.gather(params)
  # Also in processes that never score: all make the same passes.
  assert set(evaluator.gather(params)) == {""}
  scores = evaluator.score(gathered)
  assert set(scores) == {
    f"f/{b}{k}shot"
    for b in ("", "random_init/", "raw_pixels/")
    for k in (1, 10)
  }
  # The head plays no part: the features are those of random weights.
  assert scores["f/10shot"] == scores["f/random_init/10shot"]
  assert 0.7 < scores["f/raw_pixels/10shot"] < 0.95
  assert scores["f/raw_pixels/1shot"] < scores["f/raw_pixels/10shot"]


def test_fewshot_is_the_mean_over_its_draws(parts):
  numbers = np.random.default_rng(0)

  def features(split):
    labels = np.asarray(open_source("digits", split).labels())
    noise = numbers.normal(size=(len(labels), 10))
    x = (np.eye(10)[labels] + 0.5 * noise).astype(np.float32)
    return {"x": x, "label": labels, "index": np.arange(len(labels))}

  gathered = {"": (features("train"), features("test[:200]"))}

  def score(*seeds):
    evaluator = _evaluator(parts, _fewshot(shots=(1,), seeds=seeds))
    return evaluator.score(gathered)["f/1shot"]

  alone = [score(seed) for seed in range(3)]
  assert len({*alone}) > 1
  assert score(0, 1, 2) == pytest.approx(np.mean(alone))


@pytest.mark.slow
def test_fewshot_is_the_same_in_any_batch(parts, params):
  few = {"train_split": "train[:200]", "shots": (5,)}
  small = _evaluator(parts, _fewshot(batch_size=8, **few)).run(params)
  large = _evaluator(parts, _fewshot(batch_size=200, **few)).run(params)
  # Features differ in the last place only; an example or two may flip.
  assert small["f/5shot"] == pytest.approx(large["f/5shot"], abs=2 / 200)


@pytest.mark.slow
def test_fewshot_of_several_penalties(parts, params, monkeypatch):
  """Each as if alone; one decomposition and two passes for all of them."""
  l2s, eigh, calls, passes = (1.0, 64.0, 0.25), np.linalg.eigh, [], []
  evaluator = _evaluator(parts, _fewshot(l2=l2s, seeds=(0, 1)))
  forward = RunContext.forward
  with monkeypatch.context() as patch:
    patch.setattr(
      RunContext,
      "forward",
      lambda *args: passes.append(args[1]) or forward(*args),
    )
    gathered = evaluator.gather(params)
  (program,) = evaluator.programs().values()
  assert passes == [program, program]  # the shots, the split to score
  with monkeypatch.context() as patch:
    patch.setattr(np.linalg, "eigh", lambda a: calls.append(a) or eigh(a))
    scores = evaluator.score(gathered)
  assert len(calls) == 2 * 2  # shots, seeds
  want = {}
  for l2, prefix in zip(l2s, ("", "l2=64/", "l2=0.25/"), strict=True):
    evaluator.config = _fewshot(l2=(l2,), seeds=(0, 1))
    for key, value in evaluator.score(gathered).items():
      want[key.replace("f/", f"f/{prefix}")] = value
  assert scores == want and len(want) == 6
  assert len(set(scores.values())) > 2  # the penalty does matter


@pytest.mark.slow
def test_features_on_eight_devices_equal_those_on_one(params):
  """To 1e-5: float32 (eps 1.2e-7) summed otherwise in some 20 layers.

  Every device computes its 8 rows of 64; features are gathered, and no more.
  """
  one = tiny.Parts(tiny.config(), devices=jax.devices()[:1])
  many = tiny.Parts(tiny.config(mesh__fsdp=4))
  rows = []
  for p in (one, many):
    evaluator = _evaluator(p, _fewshot(shots=(5,)))
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
  batch = tiny.batch(0, tiny.config(data__batch_size=64))
  batch = sharding.to_global(batch, many.mesh)
  text = evaluator._features.lower(here, batch).compile().as_text()
  assert re.search(r"f32\[8,2,2,(8,8,3|192)\]", text)  # the patches of 8 rows
  assert re.search(r"f32\[64,32\]\S* all-gather", text)
  assert not re.search(r"\[64,16,16,3\]", text)  # no image leaves its device
  assert not re.search(r"\[64,5,32\]", text)  # nor do tokens


def test_a_batch_is_dispatched_before_the_one_before_is_fetched(parts):
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

  batches = [tiny.batch(i, parts.config) for i in range(3)]
  forward = _evaluator(parts, _classification(16)).context.forward
  values = list(forward(fn, {"numbers": iter(range(3))}, batches))
  assert values == [0, 1, 2]
  in_turn = "run 0, run 1, fetch 0, run 2, fetch 1, fetch 2"
  order = [e for e in dict.fromkeys(events) if "copy" not in e]
  assert ", ".join(order) == in_turn
  assert events.index("copy 0") < events.index("run 1")
  assert not list(forward(fn, {}, []))


def test_shots_of_0_are_all_examples(parts, params):
  """The map that `ridge.fit` finds for the whole split."""
  labels = open_source("digits", "train[:40]").labels()
  count = int(np.bincount(labels).min())
  evaluator = _evaluator(
    parts, _fewshot(train_split="train[:40]", shots=(count, 0))
  )
  gathered = evaluator.gather(params)
  assert len(gathered[""][0]["label"]) == 40
  scores = evaluator.score(gathered)
  assert set(scores) == {f"f/{count}shot", "f/all"}
  support, test = gathered[""]
  (fit,) = ridge.fit(support["x"], support["label"], 10, [1.0])
  assert scores["f/all"] == ridge.accuracy(fit, test["x"], test["label"])


def test_images_without_a_label_are_neither_learned_from_nor_scored():
  """TFDS gives images of unlabelled splits the label -1."""
  options = _fewshot(shots=(1, 0), seeds=(0,))
  table = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)

  def scores(train, test):
    sources = {
      "train_split": handmade.records(train, 2),
      "split": handmade.records(test, 2),
    }
    evaluator = options.make(handmade.context(options, sources))
    return evaluator.run({"features": table}), evaluator.answers

  scored, answers = scores([0, 1, -1, 1, 0, -1], [-1, 1, 0, -1])
  assert answers.index.tolist() == [1, 2]
  assert scored["f/1shot"] in (0.0, 0.5, 1.0)  # of two images
  fits = ridge.fit(table[[0, 1, 3, 4]], np.array([0, 1, 1, 0]), 2, [1.0])
  want = ridge.accuracy(fits[0], table[[1, 2]], np.array([1, 0]))
  assert scored["f/all"] == want
  with pytest.raises(DataError, match="f.shots: got 1 per class, but class 0"):
    scores([-1, -1], [0, 1])
  message = r"config.evals.f: got 'handmade' \[test\], in which no image has a"
  with pytest.raises(DataError, match=message):
    scores([0, 1], [-1, -1])


@pytest.mark.parametrize("missing", [0, 2])
def test_a_class_without_an_image_is_refused_also_the_last(missing):
  labels = [k for k in (0, 1, 2) if k != missing]
  options = _fewshot(shots=(1,), seeds=(0,))
  sources = {
    "train_split": handmade.records(labels, 3),
    "split": handmade.records([0, 1, 2]),
  }
  (error,) = options.check(
    "f", sources, handmade.NO_HEAD, {"pre_logits": np.zeros((1, 2))}
  )
  message = f"shots: got 1 per class, but class {missing} has 0. Take fewer"
  assert error.startswith(f"f.{message}")
  # Of files whose labels are read when they are needed, then.
  evaluator = options.make(handmade.context(options, sources))
  table = np.zeros((3, 2), np.float32)
  with pytest.raises(DataError, match=f"config.evals.f.{message}"):
    evaluator.run({"features": table})


@pytest.mark.parametrize(
  "options",
  [_fewshot(seeds=(0,)), KnnConfig(name="f", ks=(1,)), LinearConfig(name="f")],
  ids=lambda options: options.kind,
)
def test_features_that_are_not_finite_are_refused(options):
  """Their scores would be plausible: an image of NaN is class 0."""
  labels = np.arange(60) % 2
  table = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
  table[50, 1] = np.nan
  sources = {
    "train_split": handmade.records(labels[:40]),
    "split": handmade.records(labels),
  }
  evaluator = options.make(handmade.context(options, sources))
  # Before any process scores, so that all of several processes refuse.
  with pytest.raises(
    DataError,
    match=r"config.evals.f: got features of 'handmade' \[test\] with NaN or"
    r" infinity for 1 of 60 images; expected finite features",
  ):
    evaluator.gather({"features": table})


def test_features_are_read_in_the_context_of_a_head():
  """As for a linear probe before the training, whose errors name its data."""
  options = ClassificationConfig(name="val")
  train = handmade.records([0, 1], name="to learn")
  context = handmade.context(options, handmade.records([0, 1]))
  fn = features_fn(context, ("pre_logits",))
  table = np.array([[0.0], [np.inf]], np.float32)
  with pytest.raises(
    DataError, match=r"config.evals.val: got features of 'to learn' \[test\] wi"
  ):
    extract(context, train, fn, {"features": table})


@pytest.mark.parametrize("is_regression", [False, True])
@pytest.mark.parametrize("count", [3, 12])
def test_processes_share_the_reading_of_labels(
  monkeypatch, count, is_regression
):
  """More processes than records, too; -1 stays -1."""

  class InFiles(handmade.Records):
    knows_labels = False

    def load(self, raw):
      record = super().load(raw)
      keep = lambda i: read.append(int(i)) or i
      index = tf.numpy_function(keep, [record["index"]], tf.int64)
      return {**record, "index": tf.ensure_shape(index, [])}

  labels = np.arange(10) - 1
  values = vars(handmade.records(labels, num_classes=9))
  if is_regression:
    labels = np.stack([labels, -labels / 2], 1).astype(np.float32)
    more = {"table": labels, "num_classes": 2, "is_regression": True}
    values = values | more
  source = InFiles(**values)
  context = handmade.context(_fewshot(), {"split": source})
  monkeypatch.setattr(jax, "process_count", lambda: count)
  mine, read = [], []
  for i in range(count):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    monkeypatch.setattr(
      multihost_utils,
      "process_allgather",
      lambda x: mine.append(x) or np.stack([x] * count),
    )
    context.labels(source)
  assert sorted(read) == [*range(10)]  # each by one process
  monkeypatch.setattr(
    multihost_utils, "process_allgather", lambda x: np.stack(mine)
  )
  np.testing.assert_array_equal(context.labels(source), labels)


def test_a_kind_is_the_key_of_its_table():
  for kind, options in EVALUATORS.items():
    assert options().kind == kind
