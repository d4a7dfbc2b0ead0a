"""One class of each image: accuracies, mistakes, each class, subsets."""

import json

import handmade
import in_memory
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from vit_jax import class_names, losses
from vit_jax.batch import DataError
from vit_jax.config import ClassificationConfig
from vit_jax.evaluators.features import extract, features_fn
from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.evaluators.subset import SUBSETS, SubsetConfig

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, 101)
LOGITS = RNG.normal(0, 3, (101, 10)).astype(np.float32)
PARAMS = {"logits": LOGITS}
PREDICTED = LOGITS.argmax(-1)


def classification(batch_size=8, loss="softmax"):
  """Of 101 images; batches of 8 leave five for the last one."""
  options = ClassificationConfig(name="v", split="test", batch_size=batch_size)
  source = handmade.records(LABELS, 10)
  context = handmade.context(options, source, 10, objective__loss=loss)
  return options.make(context)


def test_every_image_counts_once():
  """Without the three rows that fill the last batch of 8."""
  order = np.argsort(-LOGITS, axis=1)
  top5 = [y in row[:5] for y, row in zip(LABELS, order, strict=True)]
  loss = losses.softmax_xent(jnp.asarray(LOGITS), jnp.eye(10)[LABELS])
  recall = sklearn.metrics.balanced_accuracy_score(LABELS, PREDICTED)
  for batch_size in (8, 104):
    assert classification(batch_size).run(PARAMS) == {
      "v/top1": pytest.approx(np.mean(PREDICTED == LABELS)),
      "v/top5": pytest.approx(np.mean(top5)),
      "v/balanced_accuracy": pytest.approx(recall, rel=1e-12),
      "v/loss": pytest.approx(float(loss.mean()), rel=1e-6),
      "v/count": 101,
    }
  hits = classification().hits(PARAMS)
  expected = {
    "index": np.arange(101),
    "label": LABELS,
    "prediction": PREDICTED,
    "is_right": PREDICTED == LABELS,
  }
  assert hits.keys() == expected.keys()
  for key, values in expected.items():
    np.testing.assert_array_equal(hits[key], values)


@pytest.mark.parametrize(
  "loss, limit, num_mistakes", [("softmax", 20, 7), ("sigmoid", 500, 500)]
)
def test_predictions_and_worst_mistakes(loss, limit, num_mistakes):
  rows = classification(loss=loss).predictions(PARAMS, limit, num_mistakes)
  probability = np.asarray(losses.PROBABILITIES[loss](LOGITS)).max(-1)
  wrong = np.flatnonzero(PREDICTED != LABELS)
  worst = wrong[np.argsort(-probability[wrong], kind="stable")]
  assert 7 < len(wrong) < 101
  for kind, chosen in (("", np.arange(101)[:limit]), ("mistake_", worst)):
    chosen = chosen[: num_mistakes if kind else None]
    images = rows[kind + "image"]
    np.testing.assert_array_equal(handmade.numbers(images), chosen)
    np.testing.assert_array_equal(rows[kind + "label"], LABELS[chosen])
    np.testing.assert_array_equal(rows[kind + "prediction"], PREDICTED[chosen])
    got = rows[kind + "probability"]
    np.testing.assert_allclose(got, probability[chosen], rtol=1e-5)
  assert rows["num_images"] == 101 and rows["num_wrong"] == len(wrong)
  assert rows["dataset"] == "handmade" and rows["split"] == "test"


def test_images_without_a_label_do_not_count():
  """TFDS gives images of unlabelled splits the label -1."""
  options = ClassificationConfig(name="real", split="test")
  hidden = np.where(np.arange(101) % 3, LABELS, -1)
  source = handmade.records(hidden, 10)
  scores = in_memory.evaluator(options, source, 10).run(PARAMS)
  there = hidden >= 0
  assert scores["real/count"] == there.sum()
  assert scores["real/top1"] == np.mean((PREDICTED == LABELS)[there])
  # None at all: it was not a number, which no file of JSON can hold.
  for labels in ([-1, -1], [[0, 0], [0, 0]]):
    evaluator = in_memory.evaluator(options, handmade.records(labels, 2), 2)
    with pytest.raises(DataError, match="evals.real: .* no image has a class"):
      evaluator.run({"logits": np.eye(2, dtype=np.float32)})


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


# Classes one by one.

# Six images of three classes; logits of a softmax whose shares are in the rows.
SHARES = np.array(
  [
    [0.7, 0.2, 0.1],  # 0, right
    [0.2, 0.7, 0.1],  # 0 for 1
    [0.1, 0.8, 0.1],  # 0 for 1
    [0.1, 0.8, 0.1],  # 1, right
    [0.5, 0.3, 0.2],  # 2 for 0
    [0.2, 0.2, 0.6],  # no label
  ]
)
OF_SHARES = [0, 0, 0, 1, 2, -1]
PER_CLASS = PerClassConfig(name="c", split="test")


def test_scores_and_file_of_each_class(tmp_path):
  """Classes are columns of a wider head, in another order."""
  names, order = ("cat", "dog", "cow"), (4, 0, 2)
  cat, dog, cow = order
  head_names, logits = [f"other {i}" for i in range(5)], np.full((6, 5), -30.0)
  for column, name in zip(order, names, strict=True):
    head_names[column] = name
  logits[:, order] = np.log(SHARES)
  source = handmade.records(OF_SHARES, 3, names=names)
  folder = tmp_path / "run"
  evaluator = in_memory.evaluator(
    PER_CLASS, source, 5, tuple(head_names), workdir=str(folder)
  )
  scores = evaluator.run({"logits": logits.astype(np.float32)})
  loss = -np.log([0.7, 0.2, 0.1, 0.8, 0.2]).mean()
  # Bins: 0.5 wrong; 0.7 right and wrong; 0.8 right and wrong.
  ece = (0.5 + 2 * 0.2 + 2 * 0.3) / 5
  assert scores == {
    "c/count": 5,
    "c/top1": pytest.approx(2 / 5),
    "c/top5": 1,
    "c/balanced_accuracy": pytest.approx((1 / 3 + 1 + 0) / 3),
    "c/worst_class": 0,
    "c/smallest_class": 1,
    "c/ece": pytest.approx(ece, rel=1e-6),
    "c/loss": pytest.approx(loss, rel=1e-6),
  }
  written = json.loads((folder / "c_classes.json").read_text())
  assert written["dataset"] == "handmade" and written["split"] == "test"
  assert written["count"] == 5
  counts = {c["name"]: [*c.values()][2:] for c in written["classes"]}
  assert counts == {"cat": [3, 1, 2], "dog": [1, 1, 3], "cow": [1, 0, 0]}
  assert [c["class"] for c in written["classes"]] == sorted(order)
  assert written["confusions"] == [[cat, dog, 2], [cow, cat, 1]]
  bins = written["bins"]
  assert len(bins) == 15 and sum(b["count"] for b in bins) == 5
  assert bins[0] == {"count": 0, "confidence": None, "right": None}
  assert bins[7]["count"] == 1 and bins[7]["right"] == 0.0  # 7/15 to 8/15


def test_the_size_of_the_smallest_class_is_a_score_if_it_is_small():
  """A class without images counts; from ten images on there is no score."""
  for rare, want in ((0, 0), (9, 9), (10, None)):
    source = handmade.records([0] * 12 + [1] * rare, 2)
    logits = np.zeros([12 + rare, 2], np.float32)
    scores = in_memory.evaluator(PER_CLASS, source, 2).run({"logits": logits})
    assert scores.get("c/smallest_class") == want


def test_logits_that_are_nan_write_no_file(tmp_path):
  """NumPy takes them for class 0, whose images would all be right."""
  logits = np.log(SHARES).astype(np.float32)
  logits[1] = np.nan
  source, folder = handmade.records(OF_SHARES, 3), str(tmp_path)
  evaluator = in_memory.evaluator(PER_CLASS, source, 3, workdir=folder)
  scores = evaluator.run({"logits": logits})
  assert scores["c/top1"] == pytest.approx(2 / 5)
  assert np.isnan([scores["c/worst_class"], scores["c/ece"]]).all()
  assert not [*tmp_path.iterdir()]
  logits[5], logits[1] = np.nan, 0.0  # an image without a label
  scores = evaluator.run({"logits": logits})
  assert scores["c/worst_class"] == 0.0 and [*tmp_path.iterdir()]


# ImageNet-A and -R: some of the head's classes.

A, R = (np.array(v) for v in SUBSETS.values())


def test_a_prediction_among_200_classes():
  """The first is right since 0 to 4 are left out; the second does not count."""
  assert 6 in A and not {0, 1, 2, 3, 4} & {*A}
  logits = np.zeros((4, 1000), np.float32)
  for row, best in zip(
    logits, [(0, 1, 2, 3, 4, 6), (0,), (6, 11), (988,)], strict=True
  ):
    row[[*best]] = np.arange(len(best), 0, -1)
  source = handmade.records([6, 0, 11, 988], 1000)
  evaluator = in_memory.evaluator(SubsetConfig(name="a"), source, 1000)
  scores = evaluator.run({"logits": logits})
  assert scores["a/count"] == 3
  assert scores["a/top1"] == pytest.approx(2 / 3) and scores["a/top5"] == 1.0
  # The softmax is over the 200, too.
  scored = jax.nn.log_softmax(logits[[0, 2, 3]][:, A])
  loss = -np.mean(
    [scored[i, [*A].index(k)] for i, k in enumerate((6, 11, 988))]
  )
  assert scores["a/loss"] == pytest.approx(loss, rel=1e-6)
  rows = evaluator.predictions({"logits": logits}, 10, 10)
  assert rows["prediction"].tolist() == [6, 6, 988]
  assert rows["label"].tolist() == [6, 11, 988]
  assert rows["mistake_label"].tolist() == [11]


def test_the_subsets():
  assert len({*A}) == len({*R}) == 200 and len({*A} & {*R}) == 86
  assert (np.diff(A) > 0).all() and (np.diff(R) > 0).all()
  assert A[-1] == R[-1] == 988 and R[0] == 1
  # Of ImageNet-R's class folders, the first and the last by wnid.
  wnids = class_names.imagenet1k()
  assert wnids[1] == "n01443537" and wnids[988] == "n12267677"


def test_wrong_classes_are_refused():
  swapped = tuple(reversed(class_names.imagenet1k()))
  whole = handmade.records([6], 1000)
  of_r = {"dataset": "imagenet_r:0.2.0"}
  for options, source, words in (
    (of_r, whole, ["classes: got 'imagenet_a'", "'imagenet_r'"]),
    (of_r | {"classes": "imagenet_r"}, whole, []),
    ({}, handmade.records([0, 1], 10), ["e.dataset: ", "10 classes"]),
    ({}, handmade.records([0], 1000, names=swapped), ["e.dataset: ", "order"]),
  ):
    options, head = SubsetConfig(name="a", **options), class_names.Head(1000)
    errors = in_memory.errors(options, source, head)
    assert len(errors) == bool(words)
    assert all(word in e for e in errors for word in words)
