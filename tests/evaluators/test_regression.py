"""Numbers of images: loss, standardisation, scores, and what is refused."""

import csv
import dataclasses
import io
import json
import re

import handmade
import in_memory
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.metrics
import tiny
from flax.traverse_util import flatten_dict
from PIL import Image
from self_supervised import methods

import vit_jax
from vit_jax import batch, class_names, run_checks, step, weights
from vit_jax.config import ConfigError
from vit_jax.data.download_and_prepare import import_source
from vit_jax.data.sources import Sources, open_source
from vit_jax.evaluate import evaluate
from vit_jax.finetune import probes
from vit_jax.finetune import regression_evaluator as regression
from vit_jax.finetune.data.imports import KINDS, Options
from vit_jax.finetune.regression import Regression
from vit_jax.finetune.regression_evaluator import RegressionConfig
from vit_jax.inference import output_formats as formats
from vit_jax.inference.pretrained import Answer, Value
from vit_jax.models import build
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics


def test_the_loss_in_closed_form():
  """The mean over two numbers of their standardised squared error."""
  of = batch.Standardisation((10.0, -3.0), (2.0, 0.5))
  labels = lambda: batch.LabelStatistics(None, of)
  shape = step.RunShape(2, (16, 16), 1, labels=labels)
  model = tiny.config(model__depth=1, model__width=8).model
  learner = Regression().make(model, shape, {})
  params = methods.params_of(learner.module)
  # The head's kernel is zero: the outputs are its bias.
  bias = np.array([0.5, -1.0], np.float32)
  params["head"] = {"kernel": np.zeros((8, 2), np.float32), "bias": bias}
  label = np.array([[11.0, -3.5], [8.0, -3.0], [1e6, 1e6]])
  rows = {
    "image": jnp.zeros((3, 16, 16, 3), "uint8"),
    "label": jnp.asarray(label, "float32"),
    "mask": jnp.array([True, True, False]),
    "index": jnp.arange(3),
  }
  key = jax.random.key(1)
  loss, count, _ = tiny.in_step(lambda p: learner.loss(p, rows, key, 0))(params)
  wanted = (label - [10.0, -3.0]) / [2.0, 0.5]
  want = np.square(wanted - bias).mean(1)[:2].sum()
  assert float(loss) == pytest.approx(want, rel=1e-6) and count == 2


def test_standardisation_is_that_of_all_images_with_numbers():
  labels = np.array([[1.0, 5.0], [3.0, 9.0], [np.nan, 7.0]], np.float32)
  got = batch.Standardisation.of(labels, ["a", "b"], "data")
  assert got == ((2.0, 7.0), (1.0, 2.0))
  with pytest.raises(batch.DataError, match="same value of b"):
    batch.Standardisation.of(np.array([[1, 4], [2, 4.0]]), ["a", "b"], "data")


def evaluator_of(table, names, *head):
  """The evaluator of images with these numbers, and of a head."""
  source = handmade.Records(
    name="handmade",
    split="test",
    num_examples=len(table),
    num_classes=2,
    class_names=names,
    is_regression=True,
    table=table.astype(np.float32),
  )
  options = RegressionConfig(name="v", split="test")
  evaluator = in_memory.evaluator(options, source, 2)
  head = class_names.Head(2, *head)
  evaluator.context = dataclasses.replace(evaluator.context, head=head)
  return options.make(evaluator.context)


def test_scores_are_scikit_learns():
  """In the data's units; the head's outputs are standardised, and swapped."""
  numbers = np.array([[1.0, 50.0], [2.0, 70.0], [4.0, 40.0], [8.0, 90.0]])
  outputs = np.array([[0.5, -1.0], [0.0, 1.0], [-2.0, 0.0], [1.0, 0.25]])
  of = batch.Standardisation((60.0, 3.0), (20.0, 2.0))
  head = ("size", "age"), "regression", of
  evaluator = evaluator_of(numbers, ("age", "size"), *head)
  logits = outputs[:, ::-1].astype(np.float32)
  scores = evaluator.run({"logits": logits})
  predicted = outputs * [2.0, 20.0] + [3.0, 60.0]
  for key, metric in (
    ("mae", sklearn.metrics.mean_absolute_error),
    ("r2", sklearn.metrics.r2_score),
  ):
    each = metric(numbers, predicted, multioutput="raw_values")
    for name, want in zip(
      ("", "age/", "size/"), (each.mean(), *each), strict=True
    ):
      assert scores[f"v/{name}{key}"] == pytest.approx(want, rel=1e-6)
  assert scores["v/count"] == 4
  # Numbers that do not vary have 1 or 0.
  same = np.full((3, 2), 7.0)
  got = regression.r_squared(same + [0.0, 1.0], same)
  assert got.tolist() == [1.0, 0.0]


def test_the_worst_images_and_their_numbers():
  """Of 20 images, in batches of 8; errors in units of the deviation."""
  number = np.stack([np.arange(20.0), 1000 * np.arange(20.0)], 1)
  output = number.copy()
  output[[3, 11, 19], [0, 1, 1]] += [5, 9000, -1000]
  evaluator = evaluator_of(number, ("a", "b"), ("a", "b"))
  saved = evaluator.predictions({"logits": output.astype(np.float32)}, 64, 3)
  assert handmade.numbers(saved["worst_image"]).tolist() == [11, 3, 19]
  for key, values in (("output", output), ("number", number)):
    np.testing.assert_allclose(saved[key], values)
    np.testing.assert_allclose(saved[f"worst_{key}"], values[[11, 3, 19]])
  assert saved["num_images"] == 20 and saved["names"].tolist() == ["a", "b"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  """Grey images whose level is `level`; `far` is 1000 - 2 level."""
  folder = tmp_path_factory.mktemp("numbers")
  rng = np.random.default_rng(0)
  rows = [["file", "level", "far"]]
  for i in range(64):
    level = int(rng.integers(20, 236))
    Image.new("RGB", (16, 16), (level, level, level)).save(folder / f"{i}.png")
    rows.append([f"{i}.png", level, 1000 - 2 * level])
  with (folder / "labels.csv").open("w", newline="") as file:
    csv.writer(file).writerows(rows)
  options = Options(numbers=("level", "far"))
  tfds = str(folder / "tfds")
  import_source(f"csv:{folder / 'labels.csv'}", "levels", tfds, options)
  return tfds


def config_of(data_dir, **changes):
  score = {"kind": "regression", "ops": "decode|resize(16)"}
  own = {
    "data__split": "train[:48]",
    "data__data_dir": data_dir,
    "data__dataset": "levels",
    "model__depth": 1,
    "objective": {"kind": "regression"},
    "evals": {"val": {**score, "split": "train[48:]"}},
  }
  return tiny.config(**own | changes)


def test_a_csv_of_whole_numbers_is_numbers_where_the_user_says_so(data_dir):
  source = open_source("levels", "train", data_dir)
  assert source.is_regression and source.class_names == ("level", "far")
  labels = source.labels()
  assert labels.shape == (64, 2) and labels.dtype == np.float32
  np.testing.assert_array_equal(labels[:, 1], 1000 - 2 * labels[:, 0])
  got = run_checks.setup(config_of(data_dir)).standardisation
  want = labels[:48].astype(np.float64)
  np.testing.assert_allclose(got, [want.mean(0), want.std(0)], rtol=1e-12)


@pytest.mark.nightly
def test_a_run_predicts_in_the_units_of_its_data(data_dir, tmp_path):
  """The loaded model has the scores of the run, and its numbers."""
  config = config_of(data_dir, total_steps=40)
  train_and_evaluate(config, str(tmp_path))
  scores = [r for r in read_metrics(str(tmp_path)) if "val/r2" in r][-1]
  assert scores["val/level/r2"] > 0.5
  vit = vit_jax.load(tmp_path, verbose=False)
  assert vit.loss == "regression" and vit.class_names == ("level", "far")
  labels = open_source("levels", "train[48:]", data_dir).labels()
  images = [np.full((16, 16, 3), int(level), np.uint8) for level, _ in labels]
  answers = vit.predict(images, top=1)
  assert [type(v) for v in answers[0]] == [Value, Value]
  got = np.array([[v.value for v in answer] for answer in answers])
  want = [scores["val/level/mae"], scores["val/far/mae"]]
  # Folding the deviation into the head rounds at 6e-8 of a thousand.
  np.testing.assert_allclose(np.abs(got - labels).mean(0), want, rtol=1e-4)
  again = evaluate(config, str(tmp_path))
  assert again.keys() == scores.keys() - {"step", "time"}
  for key, value in again.items():
    assert value == pytest.approx(scores[key], rel=1e-4)


def test_numbers_of_a_csv_and_of_parquet(tmp_path):
  """Lists have several; None is an image without a number for each name."""
  image = io.BytesIO()
  Image.new("RGB", (8, 8)).save(image, "PNG")
  for name in "abc":
    (tmp_path / f"{name}.png").write_bytes(image.getvalue())
  several, two = tmp_path / "several.csv", tmp_path / "two.csv"
  several.write_text("file,label\na.png,1.5|3\nb.png,-2|4\nc.png,5\n")
  two.write_text("file,x,y\na.png,1,abc\nb.png,,2\nc.png,1|2,\n")
  columns = {"x": [1, 2, 3], "y": [0.5, None, 1.0], "z": [[1.0, 2.0]] * 3}
  columns["image"] = [{"bytes": image.getvalue()}] * 3
  parquet = tmp_path / "train.parquet"
  pq.write_table(pa.table(columns), parquet)
  for path, columns, names, labels in (
    (several, ("label",), ("label 0", "label 1"), [[1.5, 3], [-2, 4], None]),
    (two, ("x", "y"), ("x", "y"), [None] * 3),
    (parquet, ("x", "y"), ("x", "y"), [[1, 0.5], None, [3, 1]]),
    (parquet, ("z",), ("z 0", "z 1"), [[1, 2]] * 3),
  ):
    kind = "csv:" if path.suffix == ".csv" else "parquet:"
    listing = KINDS[kind](str(path), Options(numbers=columns))
    assert listing.is_regression and listing.class_names == names
    entries = listing.splits["train"].entries()
    assert labels == [None if e.error else e.label.tolist() for e in entries]
    with pytest.raises(ValueError, match="--numbers: got q"):
      KINDS[kind](str(path), Options(numbers=("q",)))


def test_values_are_written_as_json_and_csv():
  age = float(np.float32(31.1))  # 31.100000381469727
  answer = Answer("a.png", [Value("age", age, 0), Value("size", -2e-5, 1)])
  out = io.StringIO()
  formats.as_json(out)(answer, None)
  assert json.loads(out.getvalue())["predictions"] == [
    {"number": "age", "index": 0, "value": 31.1},
    {"number": "size", "index": 1, "value": -2e-5},
  ]
  out = io.StringIO()
  formats.as_csv(out, False, is_regression=True)(answer, None)
  assert out.getvalue().splitlines() == [
    "image,number,index,value",
    "a.png,age,0,31.1",
    "a.png,size,1,-2e-05",
  ]


def test_what_needs_classes_or_numbers_is_refused(data_dir, tmp_path):
  config = config_of(data_dir)
  # A head of an .npz may have classes or numbers.
  params = methods.params_of(build(config.model, 2))
  np.savez(tmp_path / "x.npz", **flatten_dict(params, sep="/"))
  file = weights.read(tmp_path / "x.npz", options={"num_heads": 4})
  of = lambda loss: {"scored_weights": dataclasses.replace(file, loss=loss)}
  classes = {"objective": {"kind": "classification"}}
  for changes, weights_of, named in (
    (classes, {}, ["objective.kind: ", "evals.val.kind: "]),
    (
      {"data__dataset": "digits", "data__data_dir": None},
      {},
      ["objective.kind: ", "evals.val.dataset: .*kind='classification'"],
    ),
    ({}, of(None), ["evals.val.kind: .* do not state"]),
    ({}, of("regression"), []),
  ):
    errors = []
    try:
      run_checks.setup(config_of(data_dir, **changes), **weights_of)
    except ConfigError as e:
      errors = e.errors
    assert bool(errors) == bool(named), errors
    for text in named:
      assert any(re.match(f"config.{text}", x) for x in errors), text
  with pytest.raises(ConfigError, match="--knn: got 'levels'"):
    probes.with_probes(config, {"knn": "levels"}, Sources(data_dir))
