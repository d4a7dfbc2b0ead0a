"""A new evaluator: its options, what scores, and a line in the table."""

import dataclasses
import json

import numpy as np
import pytest
import tiny

from vit_jax import experiment, train
from vit_jax.config import ConfigError, cli, defaults, freeze, to_dict
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig
from vit_jax.options import option
from vit_jax.scoring import evaluate
from vit_jax.writers.metric_writer import read_metrics

OPS = "decode|resize(16)"


@dataclasses.dataclass(frozen=True)
class EntropyConfig(EvaluatorConfig):
  """How unsure a model is, on two splits."""

  kind: str = "entropy"
  other: str = option("train[:30]", "split to compare with")
  temperature: float = option(1.0, "divides the logits")

  SPLITS = ("split", "other")
  scores_head = True

  def errors(self, where):
    yield from super().errors(where)
    if self.temperature <= 0:
      yield f"{where}.temperature: got {self.temperature}, expected above 0."

  def check(self, where, sources, head, out):
    if sources["other"].num_examples > 100:
      yield f"{where}.other: got {sources['other'].num_examples} images."

  def make(self, context):
    return Entropy(context)


class Entropy(Evaluator):
  """Scores the mean entropy in nats, and counts the images."""

  def __init__(self, context):
    import jax

    super().__init__(context)

    def entropy(params, batch):
      logits, _ = context.predict(params, batch["image"])
      logp = jax.nn.log_softmax(logits / self.config.temperature)
      return -(jax.numpy.exp(logp) * logp).sum(-1), batch["mask"]

    self._entropy = context.jit(entropy)

  def gather(self, params):
    return {
      option: list(
        self.context.forward(
          self._entropy, params, self.context.batches(source)
        )
      )
      for option, source in self.context.sources.items()
    }

  def score(self, gathered):
    scores = {}
    for split, parts in gathered.items():
      values = np.concatenate([v[mask] for v, mask in parts])
      scores[f"{self.config.name}/{split}"] = float(values.mean())
      scores[f"{self.config.name}/{split}_count"] = float(len(values))
    return scores


@pytest.fixture(autouse=True)
def added(monkeypatch):
  monkeypatch.setitem(EVALUATORS, "entropy", EntropyConfig)


def _config(**options):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=2, model__depth=1)))
  c.data.dataset = "digits"
  own = {"kind": "entropy", "split": "test[:50]", "ops": OPS, "every_steps": 1}
  c.evals = {"unsure": own | options}
  return freeze(c)


@pytest.mark.slow
def test_it_trains_and_evaluates(tmp_path, capsys):
  workdir = str(tmp_path / "run")
  train.train_and_evaluate(_config(), workdir)
  rows = [r for r in read_metrics(workdir) if "unsure/split" in r]
  assert [r["step"] for r in rows] == [1, 2]
  assert all(r["unsure/split_count"] == 50 for r in rows)
  assert all(r["unsure/other_count"] == 30 for r in rows)
  assert 0 < rows[1]["unsure/split"] < np.log(10)
  metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
  assert metadata["preprocessing"]["ops"] == OPS
  assert not (tmp_path / "run" / "predictions.npz").exists()
  scores = evaluate.evaluate(_config(), workdir)
  assert scores == {k: rows[1][k] for k in scores} and len(scores) == 4
  out = capsys.readouterr().out
  assert "unsure      digits [test[:50]], digits [train[:30]]\n" in out


def test_its_faults_are_told_with_the_others():
  with pytest.raises(ConfigError) as e:
    experiment.setup(
      _config(temperature=0.0, other="train", split="tets", every_steps=-1)
    )
  errors = "\n".join(e.value.errors)
  for text in (
    "config.evals.unsure.temperature: got 0.0, expected above 0.",
    "config.evals.unsure.every_steps: got -1, expected 0",
    "config.evals.unsure.split: got split 'tets'",
  ):
    assert text in errors
  with pytest.raises(ConfigError, match="unsure.other: got 1297 images"):
    experiment.setup(_config(other="train"))
  with pytest.raises(ConfigError, match="temprature: no such option. Did you"):
    _config(temprature=2.0)


def test_help_shows_its_options(capsys):
  with pytest.raises(SystemExit):
    cli.parse("train", {}, ["--help=evals"])
  text = capsys.readouterr().out
  head = "of kind 'entropy' (How unsure a model is, on two splits)"
  own = text.split(head)[1]
  assert "config.evals.<name>.temperature = 1.0" in own
  assert "split to compare with" in own
