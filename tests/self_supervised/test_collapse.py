"""Alarms of a collapse: what is seen, once, also after a resume."""

import math

import numpy as np
import pytest

from vit_jax.callbacks.named import from_names
from vit_jax.self_supervised.collapse import CollapseAlarm

K = 64
LOG_K = math.log(K)


def _metrics(targets):
  """Metrics of a batch of targets, [b, K]."""
  entropy = lambda p: -(p * np.log(np.maximum(p, 1e-30))).sum(-1)
  return {
    "teacher_entropy": float(entropy(targets).mean()),
    "teacher_kl": float(LOG_K - entropy(targets.mean(0))),
  }


HEALTHY = _metrics(np.eye(K)[:16])
ONE = _metrics(np.eye(K)[[3] * 16])
UNIFORM = _metrics(np.full((16, K), 1 / K))
SKEW = _metrics(np.tile(np.arange(1, K + 1) / (K * (K + 1) / 2), (16, 1)))


def _alarm():
  lines = []
  return CollapseAlarm(K, note=lines.append), lines


@pytest.mark.parametrize("bad", [ONE, UNIFORM, SKEW])
def test_targets(bad):
  alarm, lines = _alarm()
  for step in (1, 2, 3):
    assert alarm.on_log(step, HEALTHY) == HEALTHY
  for step in (4, 5):
    alarm.on_log(step, bad)
  assert not lines  # as in the first steps of a run
  for step in (6, 7, 8):
    alarm.on_log(step, bad)
  assert len(lines) == 1 and "step 6 the teacher's targets" in lines[0]
  assert ("one prototype" in lines[0]) == (bad is ONE)
  alarm.on_log(9, HEALTHY)
  for step in (10, 11, 12):
    alarm.on_log(step, bad)
  assert len(lines) == 2 and "step 12" in lines[1]


def test_another_number_of_prototypes_is_an_error():
  for number in (None, K // 2):
    with pytest.raises(ValueError, match=f"prototypes={number}"):
      CollapseAlarm(number).on_log(1, UNIFORM)
  # A run without such targets.
  assert CollapseAlarm().on_log(1, {"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize(
  "metric, fine, bad", [("rankme", 30.0, 19.0), ("nearest", 0.1, 0.009)]
)
def test_features(metric, fine, bad):
  alarm, lines = _alarm()
  scores = lambda value: {f"r/{metric}": value, "r/count": 9.0}
  for step, value in enumerate((fine, 1.9 * fine, fine)):
    alarm.on_scores(step, scores(value))
  assert not lines
  for step in (5, 6):
    alarm.on_scores(step, scores(bad))
  assert len(lines) == 1 and f"step 5 r/{metric}" in lines[0]
  # A resumed run knows the highest value, and what it has warned of.
  again, more = _alarm()
  again.on_start(6, None, {"collapse": alarm.state_dict(6)})
  again.on_scores(7, scores(bad))
  assert not more
  again.on_scores(8, scores(fine))
  again.on_scores(9, scores(bad))
  assert len(more) == 1


def test_one_direction_from_the_start():
  alarm, lines = _alarm()
  alarm.on_scores(10, {"r/rankme": 1.2, "r/nearest": 1e-5})
  assert len(lines) == 1 and "r/rankme" in lines[0]


def test_from_a_config():
  errors = []
  text = "vit_jax.self_supervised.collapse:CollapseAlarm"
  made = from_names([text, f"{text}(prototypes=64)"], errors)
  assert not errors and len(made) == 2
