"""Signs of a collapse without labels: RankMe, neighbours, targets; alarms."""

import math

import handmade
import numpy as np
import pytest
from evaluators import in_memory
from methods import entropy

from vit_jax.callbacks.named import from_names
from vit_jax.self_supervised import rankme
from vit_jax.self_supervised.collapse import CollapseAlarm
from vit_jax.self_supervised.improvement import Improvement
from vit_jax.self_supervised.rankme import RankMeConfig

# The evaluator.


def test_rankme_in_closed_form():
  rng = np.random.default_rng(0)
  basis, _ = np.linalg.qr(rng.normal(size=(100, 12)))
  # All singular values are equal, whatever their size and the rotation.
  turn, _ = np.linalg.qr(rng.normal(size=(12, 12)))
  assert rankme.rankme(1e4 * basis @ turn) == pytest.approx(12, rel=1e-4)
  # Two of them in the ratio 1 to 3.
  p = np.array([0.25, 0.75])
  two = basis[:, :2] @ (p[:, None] * turn[:2])
  assert rankme.rankme(two) == pytest.approx(np.exp(entropy(p)), abs=1e-3)
  assert rankme.rankme(np.zeros((9, 12))) == pytest.approx(1, abs=1e-3)
  # The definition, of more columns than rows.
  x = rng.normal(1, 2, (7, 60)).astype(np.float32)
  values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
  p = values / values.sum() + 1e-7
  assert rankme.rankme(x) == pytest.approx(np.exp(entropy(p)))


def test_nearest_is_that_of_brute_force():
  x = np.random.default_rng(0).normal(0.5, 1, (50, 6)).astype(np.float32)
  x[7] = 3 * x[30]  # of the same direction
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  similarity = unit @ unit.T
  np.fill_diagonal(similarity, -2)
  distance = 1 - similarity.max(1)
  assert rankme.nearest(x) == pytest.approx(distance.mean(), abs=1e-6)
  some = distance[np.arange(8) * 50 // 8]
  assert rankme.nearest(x, 8) == pytest.approx(some.mean(), abs=1e-6)


def test_images_without_labels_count():
  """Of more than max_images, some of all parts of the split."""
  x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
  source = handmade.records(np.full(30, -1), 3)
  for options, rows in (({}, x), (dict(max_images=10), x[::3])):
    options = RankMeConfig(name="r", **options)
    scores = in_memory.evaluator(options, source).run({"features": x})
    assert scores == {
      "r/rankme": pytest.approx(rankme.rankme(rows)),
      "r/nearest": pytest.approx(rankme.nearest(rows)),
      "r/count": len(rows),
    }


# The alarm: once, also after a resume.

K = 64


def metrics(targets):
  """Metrics of a batch of targets, [b, K]."""
  return {
    "teacher_entropy": float(entropy(targets).mean()),
    "teacher_kl": float(math.log(K) - entropy(targets.mean(0))),
  }


HEALTHY = metrics(np.eye(K)[:16])
ONE = metrics(np.eye(K)[[3] * 16])
UNIFORM = metrics(np.full((16, K), 1 / K))
SKEW = metrics(np.tile(np.arange(1, K + 1) / (K * (K + 1) / 2), (16, 1)))


def new_alarm():
  lines = []
  return CollapseAlarm(K, note=lines.append), lines


@pytest.mark.parametrize("bad", [ONE, UNIFORM, SKEW])
def test_alarm_of_targets(bad):
  """After three rows, as it may be in the first steps of a run."""
  alarm, lines = new_alarm()
  values = [HEALTHY] * 3 + [bad] * 5 + [HEALTHY] + [bad] * 3
  warned = []
  for step, value in enumerate(values, start=1):
    assert alarm.on_log(step, value) == value
    warned += [step] * (len(lines) - len(warned))
  assert warned == [6, 12]
  assert ("one prototype" in lines[0]) == (bad is ONE)


@pytest.mark.parametrize(
  "metric, fine, bad", [("rankme", 30.0, 28.0), ("nearest", 0.1, 0.018)]
)
def test_alarm_of_features(metric, fine, bad):
  alarm, lines = new_alarm()
  scores = lambda value: {f"r/{metric}": value, "r/count": 9.0}
  for step, value in enumerate((fine, 1.9 * fine, fine)):
    alarm.on_scores(step, scores(value))
  assert not lines
  for step in (5, 6):
    alarm.on_scores(step, scores(bad))
  assert len(lines) == 1 and f"step 5 r/{metric}" in lines[0]
  # A resumed run knows the highest value, and what it has warned of.
  again, more = new_alarm()
  again.on_start(6, None, {"collapse": alarm.state_dict(6)})
  again.on_scores(7, scores(bad))
  assert not more
  again.on_scores(8, scores(fine))
  again.on_scores(9, scores(bad))
  assert len(more) == 1


def test_alarm_of_one_direction_from_the_start():
  alarm, lines = new_alarm()
  alarm.on_scores(10, {"r/rankme": 1.2, "r/nearest": 1e-5})
  assert len(lines) == 1 and "r/rankme" in lines[0]


def test_alarms_of_a_config():
  """The number of prototypes must be that of the objective."""
  errors = []
  text = "vit_jax.self_supervised.collapse:CollapseAlarm"
  made = from_names([text, f"{text}(prototypes={K // 2})"], errors)
  assert not errors
  assert made[0].on_log(1, {"loss": 1.0})  # a run without such targets
  for alarm in made:
    with pytest.raises(ValueError, match="prototypes="):
      alarm.on_log(1, UNIFORM)


def test_the_last_line_says_that_a_score_fell():
  line = Improvement({"knn/20nn": "k-NN"})
  line.on_start(8, None, {"improvement": {"knn/20nn": [0, 0.5]}})
  assert line.text() == ""
  line.on_scores(9, {"knn/20nn": 0.25, "other": 1.0})
  assert "50.0 % -> 25.0 %; it fell" in line.text()
  assert line.state_dict(9) == {"knn/20nn": [0, 0.5]}
