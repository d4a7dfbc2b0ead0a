"""Facts of a run as the report tells them."""

import json

import pytest

from vit_jax.reporting import facts, runs


@pytest.mark.parametrize(
  "config, text",
  [
    (
      {"objective": {"kind": "masked_patch", "target": "small"}},
      "masked patch",
    ),
    ({"objective": {"kind": "classification", "loss": "sigmoid"}}, "sigmoid"),
    ({"loss": "sigmoid", "label_smoothing": 0.1}, "sigmoid"),  # of an old run
  ],
)
def test_the_objective_is_told(config, text, tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  (run,) = runs.find_runs(tmp_path)
  assert text in facts.facts(run)["objective"]
