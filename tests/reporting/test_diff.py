"""vit-jax diff, where two runs differ; vit-jax verify, what is damaged."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from fake_runs import write

from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.commands import diff, verify
from vit_jax.config import CheckpointConfig, Config, OptimConfig
from vit_jax.step import TrainState

METADATA = {
  "devices": "8 x cpu",
  "mesh": {"data": 8, "fsdp": 1},
  "versions": {"jax": "0.10.2"},
}


def _write(folder, lr, moved=0.0):
  """A run of four steps, whose updates differ by `moved`."""
  rows = [
    {
      "step": step,
      "time": 10.0 * step,
      "train/loss": 2.0 / step + moved * (step > 1),
      "train/images_per_second": 50.0,
      "train/param_norm": 3.0 + moved,
    }
    for step in (1, 2, 3, 4)
  ]
  config = Config(total_steps=4, optim=OptimConfig(lr=lr))
  write(folder, rows, config, METADATA)
  checkpointer = Checkpointer(str(folder), CheckpointConfig(keep_last=9))
  params = {
    "embedding": {"kernel": jax.random.normal(jax.random.key(0), 4096)},
    "encoder_norm": {
      "bias": jnp.full(32, moved),
      "scale": jnp.ones(32) + moved,
    },
  }
  for step in (2, 4):
    state = TrainState(jnp.int32(step), params, ())
    checkpointer.save(step, state, METADATA)
  checkpointer.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two that differ in the learning rate."""
  folder = tmp_path_factory.mktemp("runs")
  _write(folder / "a", 0.01)
  _write(folder / "b", 0.02, moved=0.125)
  return folder


@pytest.fixture
def copy(runs, tmp_path):
  """A copy of run a."""
  return pathlib.Path(shutil.copytree(runs / "a", tmp_path / "copy"))


def _compare(a, b, capsys):
  status = diff.main([str(a), str(b)])
  return status, capsys.readouterr().out


def _rows(change):
  """Returns a function that changes the rows of a run, each by its step."""

  def in_folder(run):
    path = run / "metrics.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    changed = [row | change(row["step"], row) for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))

  return in_folder


def _from_step_3(step, row):
  # The speed measures the machine.
  loss = row["train/loss"] + 1e-6 * (step > 2)
  return {"train/loss": loss, "train/images_per_second": 0.1 * step}


def _shorter(run):
  path = run / "metrics.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def _another_machine(run):
  changed = {"devices": "4 x TPU v5e", "mesh": {"data": 4, "fsdp": 1}}
  (run / "metadata.json").write_text(json.dumps(METADATA | changed))
  (run / "config.json").unlink()


def _nothing(run):
  (run / "metrics.jsonl").unlink()
  shutil.rmtree(run / "checkpoints")


NAN = _rows(lambda step, row: {"train/loss": float("nan")})
CASES = {
  "times alone": (
    _rows(lambda step, row: {"time": row["time"] + 60}),
    0,
    ["steps 1 to 4: equal, 4 rows", "step 2: equal, ", "step 4: equal, "],
  ),
  "from step 3": (
    _rows(_from_step_3),
    1,
    ["step 3: train/loss ", "2 of 4 rows differ", "differ at step 3"],
  ),
  "NaN": (NAN, 1, ["step 1: train/loss 2.0 and nan", "4 of 4 rows differ"]),
  "shorter": (
    _shorter,
    0,
    ["steps 1 to 2: equal, 2 rows", "metrics: steps 1 to 2; checkpoints: 2, 4"],
  ),
  "nothing": (_nothing, 2, ["no metric and no checkpoint"]),
  "damaged checkpoint": (
    lambda run: (run / "checkpoints/2/digests.json").unlink(),
    0,  # by the rows, and step 4
    ["step 2 of B: ", "digests.json is missing", "step 4: equal"],
  ),
  "another machine": (
    _another_machine,
    0,
    ["devices: 8 x cpu and 4 x TPU v5e", "mesh.data: 8 and 4"]
    + ["config.optim.lr: 0.01 and not known"],
  ),
}


@pytest.mark.parametrize("change, status, texts", CASES.values(), ids=CASES)
def test_what_differs_is_named(runs, copy, capsys, change, status, texts):
  change(copy)
  got, printed = _compare(runs / "a", copy, capsys)
  assert got == status
  for text in texts:
    assert text in printed


def test_another_learning_rate(runs, copy, capsys):
  """The first loss is the same, the first update is not."""
  status, text = _compare(runs / "a", runs / "b", capsys)
  assert status == 1 and "devices" not in text
  assert "config.optim.lr: 0.01 and 0.02" in text
  assert "step 1: train/param_norm " in text
  assert "step 1: train/loss" not in text
  # In the order of the tree; the step is the same.
  first = "the first is params/encoder_norm/bias: float32[32] "
  assert f"2 of 4 arrays differ, {first}" in text
  # One checkpoint alone.
  shutil.rmtree(copy / "checkpoints/4")
  shutil.copytree(runs / "b/checkpoints/4", copy / "checkpoints/4")
  status, text = _compare(runs / "a", copy, capsys)
  assert status == 1 and "step 2: equal" in text and "at step 4" in text


def test_what_is_equal(copy, tmp_path, capsys):
  """What is no number in both, and a folder by its other path."""
  NAN(copy)
  other = pathlib.Path(shutil.copytree(copy, tmp_path / "b"))
  for run, path in ((copy, "images/"), (other, os.path.abspath("images"))):
    config = json.loads((run / "config.json").read_text())
    config["data"]["dataset"] = f"folder:{path}"
    (run / "config.json").write_text(json.dumps(config))
  status, text = _compare(copy, other, capsys)
  assert status == 0 and "dataset" not in text
  assert "steps 1 to 4: equal, 4 rows" in text


def test_what_cannot_be_compared(runs, copy, tmp_path, capsys):
  (copy / "config.json").write_text("{")
  for folder, named in ((copy, "config.json"), (tmp_path, str(tmp_path))):
    assert diff.main([str(runs / "a"), str(folder)]) == 2
    assert named in capsys.readouterr().err


def test_verify_prints_a_line_for_each_checkpoint(copy, capsys, monkeypatch):
  monkeypatch.chdir(copy.parent)  # a path from here
  verify.main([copy.name])
  assert capsys.readouterr().out.count(" ok: ") == 2
  arrays = (copy / "checkpoints/2/params/ocdbt.process_0/d").iterdir()
  largest = max(arrays, key=lambda p: p.stat().st_size)
  raw = bytearray(largest.read_bytes())
  raw[len(raw) // 2] ^= 1
  largest.write_bytes(raw)
  with pytest.raises(SystemExit, match="1 of 2 damaged"):
    verify.main([str(copy)])
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith("step 2          damaged: params/embedding/")
  assert second.startswith("step 4          ok: ")
  verify.main([str(copy), "4"])
  with pytest.raises(SystemExit, match="got no step 3; there is 2, 4"):
    verify.main([str(copy), "3"])
