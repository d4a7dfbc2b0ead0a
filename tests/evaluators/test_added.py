"""The errors of an evaluator that somebody adds come with all others.

That one trains and scores is part of test_examples.py.
"""

import dataclasses
import re

import pytest
import tiny

from vit_jax import run_checks
from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.evaluator import EvaluatorConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class EntropyConfig(EvaluatorConfig):
  """How unsure a model is, on two splits."""

  kind: str = "entropy"
  other: str = option("train[:30]", "split to compare with")
  temperature: float = option(1.0, "divides the logits")

  SPLITS = ("split", "other")

  def errors(self, where):
    yield from super().errors(where)
    if self.temperature <= 0:
      yield f"{where}.temperature: got {self.temperature}, expected above 0."

  def check(self, where, sources, head, out):
    if sources["other"].num_examples > 100:
      yield f"{where}.other: got {sources['other'].num_examples} images."


def _config(**options):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=2, model__depth=1)))
  c.data.dataset = "digits"
  own = {"kind": "entropy", "split": "test[:50]", "ops": "decode|resize(16)"}
  c.evals = {"unsure": own | options}
  return freeze(c)


def test_its_errors_are_reported_with_the_others(monkeypatch):
  monkeypatch.setitem(EVALUATORS, "entropy", EntropyConfig)
  for wrong, named in (
    (
      {"temperature": 0.0, "other": "train", "split": "tets"}
      | {"every_steps": -1},
      ["temperature: got 0.0", "every_steps: got -1", "split: got .*'tets'"],
    ),
    ({"other": "train"}, ["other: got 1297 images"]),
  ):
    with pytest.raises(ConfigError) as e:
      run_checks.setup(_config(**wrong))
    for text in named:
      errors = [x for x in e.value.errors if "unsure" in x]
      assert any(re.search(f"unsure.{text}", x) for x in errors), text
