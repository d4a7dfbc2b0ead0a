"""Probes of one's own images: of published weights, and in the report."""

import json
import pathlib
import re
import types

import numpy as np
import pytest
import tiny
from PIL import Image
from shared_runs import folder

import vit_jax
from vit_jax import ridge
from vit_jax.commands import evaluate as command
from vit_jax.config import Config, ConfigError, defaults, freeze
from vit_jax.data.preprocessing import with_decoding
from vit_jax.data.sources import Sources
from vit_jax.data.splits import SplitError
from vit_jax.evaluators import knn, linear
from vit_jax.finetune import probes
from vit_jax.tools.reporting import report

TOKEN = pathlib.Path(__file__).parents[1] / "data/vit_linen_names.weights.npz"


def main(*argv):
  command.main(argv)


@pytest.fixture(scope="module")
def scored(run, tmp_path_factory):
  """All probes of published weights: no config, the file says what it is."""
  workdir = tmp_path_factory.mktemp("runs") / "token"
  main(
    f"--checkpoint={TOKEN}",
    *(f"--{kind}={run.dataset}" for kind in command.PROBES),
    f"--workdir={workdir}",
    "--config.data.batch_size=8",
  )
  files = sorted((workdir / probes.FOLDER).glob("*.json"))
  probed = {p.name.split("_")[0]: json.loads(p.read_text()) for p in files}
  return workdir, probed


@pytest.mark.slow
@pytest.mark.parametrize("kind", command.PROBES)
def test_what_is_written_of_a_probe(scored, kind, run):
  """An image of `val`, a blue one, is in a wrong folder."""
  workdir, probed = scored
  probe = probed[kind]
  assert (probe["dataset"], probe["split"]) == (run.dataset, "val")
  assert (probe["kind"], probe["count"], probe["num_wrong"]) == (kind, 20, 1)
  names = ("name", "count", "right", "predicted")
  assert [tuple(c[name] for name in names) for c in probe["classes"]] == [
    ("blue", 4, 4, 5),
    ("green", 5, 5, 5),
    ("red", 6, 5, 5),
    ("white", 5, 5, 5),
  ]
  assert probe["confusions"] == [[2, 0, 1]]
  (row,) = probe["mistakes"]
  assert (row["label"], row["prediction"]) == ("red", "blue")
  assert "val/red/was_blue.png" in row["record"]
  assert row["score"] > row["of_label"]
  # The answers to single images have the accuracy that was scored.
  name = {"fewshot": "all", "linear": "top1", "knn": "20nn"}[kind]
  assert probe["scores"][name] == pytest.approx(19 / 20)
  (images,) = (workdir / probes.FOLDER).glob(f"{kind}_*.npz")
  (picture,) = np.load(images)["image"]
  assert picture.shape == (32, 32, 3)
  root = pathlib.Path(run.dataset.removeprefix("folder:"))
  with Image.open(root / "val" / "red" / "was_blue.png") as image:
    mean = np.asarray(image).mean((0, 1))
  np.testing.assert_allclose(picture.mean((0, 1)), mean, atol=3)


@pytest.mark.slow
def test_the_line_of_scores_and_the_report(scored, run):
  """Of published weights the report has the probes alone."""
  workdir, probed = scored
  (line,) = (workdir / "evaluation.jsonl").read_text().splitlines()
  row = json.loads(line)
  keys = {"checkpoint", "step", "time", "dtype", "data", "scores"}
  assert set(row) == keys
  assert row["scores"]["fewshot/all"] == probed["fewshot"]["scores"]["all"]
  assert "knn/20nn" in row["scores"] and "knn/100nn" not in row["scores"]

  def page():
    text = report.write_report(str(workdir)).read_text()
    return re.sub(r"<wbr>|</?[bi]>", "", text)

  text = page()
  for title in ("Few-shot", "Linear probe", "Nearest neighbours"):
    assert f"<h2>{title} on {run.dataset}</h2>" in text
  assert text.count("<h2>") == 3
  assert text.count("true: <bdi>red</bdi>") == 3
  assert "19 of 20 images" in text and "Left out" not in text
  # A damaged file is named.
  file = next((workdir / probes.FOLDER).glob("knn_*.json"))
  file.write_text(file.read_text()[:50])
  text = page()
  assert text.count("<h2>") == 2
  assert f"Left out: probes/{file.name} of token: " in text


def with_fewshot(config, dataset):
  (probe,) = probes.with_probes(config, {"fewshot": dataset}, Sources()).evals
  return probe


def test_fewshot_takes_test_before_val_and_the_options_of_the_config(tmp_path):
  root, colours = tmp_path / "own", {"a": "red", "b": "blue"}
  dataset = f"folder:{root}"
  folder(root / "train", colours, 12)
  folder(root / "valid", colours, 2)
  evals = {"val": {"kind": "classification", "ops": "decode|resize((16, 16))"}}
  probe = with_fewshot(tiny.config(evals=evals), dataset)
  assert (probe.train_split, probe.split) == ("train", "val")
  assert probe.shots == (1, 5, 10, 0) and not probe.baselines
  assert probe.ops == "decode|resize((16, 16))"
  folder(root / "Testing", colours, 2)
  evals = {"f": {"kind": "fewshot", "l2": (1.0, 2.0), "shots": (3, 30)}}
  probe = with_fewshot(tiny.config(evals=evals), dataset)
  assert probe.split == "test"
  assert probe.l2 == (1.0, 2.0) and probe.shots == (3, 0)
  assert probe.name == "fewshot"  # not that of the config's own


def test_a_split_without_labels_is_not_scored(capsys):
  """As the test split of ImageNet, whose labels, -1, are secret."""
  labels = {"train": [0, -1, 1, 1], "test": [-1, -1], "validation": [1, 0]}
  facts = dict(is_multilabel=False, is_regression=False, class_names=("a", "b"))

  class Opened(Sources):
    def inspect(self, dataset, split):
      if split not in labels:
        raise SplitError(f"no {split}")
      array = np.array(labels[split])
      facts.update(labels=lambda: array, num_examples=len(array), num_classes=2)
      return types.SimpleNamespace(**facts)

  def probe(kind):
    return probes.with_probes(Config(), {kind: "x"}, Opened(None)).evals[0]

  fewshot = probe("fewshot")
  assert fewshot.split == "validation"
  assert fewshot.shots == (1, 0)  # one image of class 0
  said = capsys.readouterr().out
  assert "without 5, 10, 25 shots" in said and "the fewest a: 1" in said
  assert probe("knn").ks == (1,)
  assert "without 20, 10, 100, 200 neighbours" in capsys.readouterr().out
  del labels["validation"]
  with pytest.raises(ConfigError, match="and no split"):
    probe("fewshot")


@pytest.mark.slow
def test_model_and_preprocessing_are_those_of_load():
  path = str(TOKEN.parent / "bit_v2.weights.npz")
  vit = vit_jax.load(path, verbose=False)
  config = probes.config_of_file(Config(), path, "float32")
  assert (config.model, config.data.ops) == (vit.config, vit.ops)
  # How images are decoded is no preprocessing of the file.
  c = defaults()
  c.data.background = "white"
  decoded = probes.config_of_file(freeze(c), path, "float32").data.ops
  assert decoded == with_decoding(vit.ops, background="white") != vit.ops
  with pytest.raises(ConfigError, match="config.data.ops: got a value, exp"):
    c.data.ops = "decode|resize(8)"
    probes.config_of_file(freeze(c), path)


# Answers to single images.


def test_answers_of_a_regression_a_head_and_of_neighbours():
  """Of two points the closed form is known: mean 0, deviation 1, both +-1."""
  x, labels = np.array([[-1.0], [1.0], [3.0]]), np.array([0, 0, 1])
  (fit,) = ridge.fit(x[:2], np.array([0, 1]), 2, [1e-9])
  best, score, of_label = ridge.scores(fit, x, labels)
  assert best.tolist() == ridge.predict(fit, x).tolist() == [0, 1, 1]
  # The floor of the deviation, 1e-5, is the difference.
  np.testing.assert_allclose(score, [1, 1, 3], rtol=2e-5)
  np.testing.assert_allclose(of_label, [1, -1, 3], rtol=2e-5)
  # Logits 0 and log 3 are the probabilities 1/4 and 3/4.
  d, log3 = np.zeros(1, np.float32), np.log(np.float32(3))
  kernels = np.array([[[9.0, 9.0]], [[0.0, 1.0]]], np.float32)
  heads = linear.Heads(d, d + 1, kernels, np.zeros((2, 2), np.float32))
  rows = {"x": np.array([[log3], [-log3]]), "label": np.array([0, 0])}
  best, chance, of_label = heads.answers(rows, 1)
  assert best.tolist() == [1, 0]
  np.testing.assert_allclose(chance, [0.75, 0.75], rtol=1e-6)
  np.testing.assert_allclose(of_label, [0.25, 0.75], rtol=1e-6)
  # Shares of votes sum to one.
  rng = np.random.default_rng(0)
  near, labels = rng.uniform(-1, 1, (5, 8)), rng.integers(0, 3, (5, 8))
  shares = [knn.share_of(near, labels, np.full(5, k)) for k in range(3)]
  np.testing.assert_allclose(np.sum(shares, 0), 1, rtol=1e-12)
  best = knn.vote(near, labels, 3, 0.07)
  np.testing.assert_array_equal(np.argmax(shares, 0), best)
