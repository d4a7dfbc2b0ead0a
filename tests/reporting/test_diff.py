"""vit-jax diff: the first row and the first array in which two runs differ."""

import json
import os
import shutil

import pytest
import tiny

from vit_jax import train
from vit_jax.commands import diff
from vit_jax.config import defaults, freeze, to_dict


def _config(**changes):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=4, log_steps=1, model__depth=1)))
  c.data.dataset, c.fake_data = "digits", True
  c.checkpoint.every_steps, c.checkpoint.keep_last = 2, 9
  tiny.apply(c, changes)
  return freeze(c)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two that differ in the learning rate."""
  folder = tmp_path_factory.mktemp("runs")
  for name, lr in (("a", 0.01), ("b", 0.02)):
    cfg = _config(optim__lr=lr)
    train.train_and_evaluate(cfg, str(folder / name), tiny.Data())
  return folder


@pytest.fixture
def copy(runs, tmp_path):
  """Returns a copy of run a, whose rows of metrics a function has changed."""

  def make(change=lambda rows: rows, ignore=()):
    new = tmp_path / "copy"
    shutil.copytree(runs / "a", new, ignore=shutil.ignore_patterns(*ignore))
    path = new / "metrics.jsonl"
    if path.exists():
      rows = change([json.loads(x) for x in path.read_text().splitlines()])
      path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return new

  return make


def _compare(a, b, capsys):
  status = diff.main([str(a), str(b)])
  return status, capsys.readouterr().out


def test_runs_that_differ_in_their_times_alone(runs, copy, capsys):
  later = lambda rows: [row | {"time": row["time"] + 60} for row in rows]
  status, text = _compare(runs / "a", copy(later), capsys)
  assert status == 0
  assert "options, versions and data\n  equal\n" in text
  assert "steps 1 to 4: equal, 4 rows" in text
  assert "step 2: equal, " in text and "step 4: equal, " in text
  assert text.endswith("equal in all that both have\n")


def test_another_learning_rate(runs, capsys):
  """The first loss and gradient are the same, the first update is not."""
  status, text = _compare(runs / "a", runs / "b", capsys)
  assert status == 1
  assert "config.optim.lr: 0.01 and 0.02" in text
  assert "step 1: train/param_norm " in text and "train/loss" not in text
  assert "steps 1 to 4: 4 of 4 rows differ" in text
  assert text.endswith("the runs differ at step 1, or before it\n")
  # In the order of the tree; the step and the counts are the same.
  first = "the first is params/Transformer/encoder_norm/bias: float32[32] "
  assert f"arrays differ, {first}" in text
  assert "devices" not in text


def test_the_first_row_that_differs(runs, copy, capsys):
  def from_step_3(rows):
    for row in rows[2:]:
      row["train/loss"] += 1e-6
    rows[1]["train/images_per_second"] = 0.1  # measures the machine
    return rows

  status, text = _compare(runs / "a", copy(from_step_3), capsys)
  assert status == 1 and "step 3: train/loss " in text
  assert "steps 1 to 4: 2 of 4 rows differ" in text
  assert text.endswith("the runs differ at step 3, or before it\n")


def test_what_is_not_a_number_in_both_is_equal(runs, copy, capsys):
  nan = lambda rows: [row | {"train/loss": float("nan")} for row in rows]
  other = copy(nan)
  status, text = _compare(other, other, capsys)
  assert status == 0 and "steps 1 to 4: equal, 4 rows" in text
  status, text = _compare(runs / "a", other, capsys)
  assert status == 1 and " and nan" in text


def test_of_different_lengths(runs, copy, capsys):
  status, text = _compare(runs / "a", copy(lambda rows: rows[:2]), capsys)
  assert status == 0 and "steps 1 to 2: equal, 2 rows" in text
  assert "metrics: steps 1 to 2; checkpoints: 2, 4" in text


def test_without_metrics_or_checkpoints(runs, copy, capsys):
  other = copy(ignore=("metrics.jsonl",))
  status, text = _compare(runs / "a", other, capsys)
  assert status == 0 and "metrics\n  none in both runs\n" in text
  assert "metrics: none; checkpoints: 2, 4" in text
  shutil.rmtree(other / "checkpoints")
  status, text = _compare(runs / "a", other, capsys)
  assert status == 2 and "none of a step that both have" in text
  assert text.endswith("no metric and no checkpoint is in both\n")


def test_a_damaged_checkpoint(runs, copy, capsys):
  other = copy(ignore=("digests.json",))
  status, text = _compare(runs / "a", other, capsys)
  assert "step 2 of B: " in text and "digests.json is missing" in text
  assert status == 0  # by the rows


def test_what_differs_between_the_machines(runs, copy, capsys):
  other = copy()
  path = other / "metadata.json"
  metadata = json.loads(path.read_text())
  metadata["devices"], metadata["versions"]["jax"] = "4 x TPU v5e", "0.99"
  metadata["mesh"] = {"data": 4, "fsdp": 1, "tensor": 1}
  metadata["data_identity"] = "others"
  path.write_text(json.dumps(metadata))
  (other / "config.json").unlink()
  _, text = _compare(runs / "a", other, capsys)
  assert "devices: 8 x cpu and 4 x TPU v5e" in text
  assert "mesh.data: 8 and 4" in text and "and 0.99" in text
  assert "data_identity: " in text
  assert "config.optim.lr: 0.01 and not known" in text


def test_a_folder_by_a_relative_and_an_absolute_path(copy, tmp_path, capsys):
  a, b = copy(), tmp_path / "b"
  shutil.copytree(a, b)
  for run, path in ((a, "images/"), (b, os.path.abspath("images"))):
    config = json.loads((run / "config.json").read_text())
    config["data"]["dataset"] = f"folder:{path}"
    (run / "config.json").write_text(json.dumps(config))
  status, text = _compare(a, b, capsys)
  assert status == 0 and "options, versions and data\n  equal\n" in text


def test_what_cannot_be_compared(runs, copy, tmp_path, capsys):
  other = copy()
  (other / "config.json").write_text("{")
  for folder, message in (
    (other, "config.json: got no JSON"),
    (tmp_path, "expected the folder of a run"),
  ):
    assert diff.main([str(runs / "a"), str(folder)]) == 2
    assert message in capsys.readouterr().err
