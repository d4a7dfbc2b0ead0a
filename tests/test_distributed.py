"""Two real processes train, stop and evaluate as one would."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from vit_jax.writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
from vit_jax.config import defaults

def get_config():
  c = defaults()
  c.total_steps = 6
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.dataset = "digits"
  c.data.ops = "decode|resize(16)"
  c.data.batch_size = 16
  c.optim.lr = 1e-2
  c.log_steps = 1
  c.checkpoint.every_steps = 3
  ops = "decode|resize(16)"
  c.evals = {
    "test": {"kind": "classification", "split": "test[:101]", "ops": ops},
    "few": {"kind": "fewshot", "split": "test[:101]", "ops": ops, "l2": 1.0},
  }
  return c
"""


def _free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def _train(config, workdir, num_processes, *words):
  """Runs the command in every process; returns what each printed."""
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  command = [sys.executable, "-m", "vit_jax.train", f"--config={config}"]
  command += [f"--workdir={workdir}", *words]
  port = _free_port()
  processes = []
  for i in range(num_processes):
    if num_processes > 1:
      env |= {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(i),
      }
    processes.append(
      subprocess.Popen(
        command,
        env=dict(env),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
      )
    )
  outputs = [p.communicate(timeout=300)[0] for p in processes]
  for p, out in zip(processes, outputs, strict=True):
    assert p.returncode == 0, out
  return outputs


def _values(workdir):
  return [
    {
      k: v
      for k, v in row.items()
      if k.split("/")[0] in ("train", "test", "few") and "per_second" not in k
    }
    for row in read_metrics(str(workdir))
  ]


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path):
  config = tmp_path / "tiny.py"
  config.write_text(CONFIG)
  _train(config, tmp_path / "one", 1)
  first, second = _train(config, tmp_path / "two", 2)
  assert "step 6/6" in first and "2 process(es)" in first
  assert not re.search(r"^step ", second, re.M)  # only process 0 speaks
  one, two = _values(tmp_path / "one"), _values(tmp_path / "two")
  assert len(one) == len(two) == 8
  for a, b in zip(one, two, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      # Two devices add up in another order than one.
      np.testing.assert_allclose(a[key], b[key], rtol=1e-5, err_msg=key)
  assert one[-2]["test/count"] == 101

  # What two processes wrote, two go on with, and one.
  config_json = json.loads((tmp_path / "two/config.json").read_text())
  assert config_json["total_steps"] == 6
  out, _ = _train(config, tmp_path / "two", 2, "--config.total_steps=7")
  assert "resumes     step 6" in out and "step 7/7" in out
  (out,) = _train(config, tmp_path / "two", 1, "--config.total_steps=8")
  assert "resumes     step 7" in out and "step 8/8" in out
