"""The command that most people run first, on their own images."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from shared_runs import folder

WEIGHTS = pathlib.Path(__file__).parents[1] / "data/vit_token.weights.npz"


@pytest.mark.nightly
def test_it_begins_with_trials_and_resumes_with_their_choice(tmp_path):
  images, workdir = tmp_path / "images", tmp_path / "run"
  folder(images, {"sea": "blue", "grass": "green", "snow": "white"}, 24)
  config = f"folder:path={images},init={WEIGHTS},res=16,budget=160"

  def train():
    command = [sys.executable, "-m", "vit_jax", "train", f"--config={config}"]
    command += [f"--workdir={workdir}", "--config.total_steps=24"]
    # Only the rates are tried: the others are set.
    command += ["--config.data.ops=decode|resize(16)"]
    command += ["--config.optim.freeze=()"]
    command += ["--config.optim.warmup_steps=2"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr

  first = train()
  record = json.loads((workdir / "trials.json").read_text())
  assert record["steps"] >= 20 and record["chosen"] is not None
  assert {t["steps"] for t in record["trials"]} == {record["steps"]}
  assert f"chosen      {record['chosen']}" in first
  probe = json.loads((workdir / "linear_probe.json").read_text())
  assert probe["fine_tuned"] is not None
  rows = (workdir / "metrics.jsonl").read_text().splitlines()
  tested = [row for row in map(json.loads, rows) if "test/top1" in row]
  assert [row["step"] for row in tested] == [24]  # once, at the end
  again = train()
  assert "complete    all 24 steps were done before" in again
