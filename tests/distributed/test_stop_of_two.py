"""Two processes of a run: a signal to one stops both, a death ends both."""

import json
import os
import re
import signal

import pytest
from faults import runs

pytestmark = pytest.mark.faults

CONFIG = """
from vit_jax.config import defaults

def get_config():
  c = defaults()
  c.total_steps = 10**6
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 16, 1
  c.model.mlp_dim, c.model.num_heads = 16, 2
  c.data.dataset = "digits"
  c.data.ops = "decode|resize(16)"
  c.data.batch_size = 8
  c.optim.lr = 1e-3
  c.checkpoint.every_steps = 0
  c.heartbeat_timeout_seconds = 5
  return c
"""
pytestmark = pytest.mark.nightly


@pytest.fixture
def two(tmp_path):
  """Two processes that have done some steps, and the folder of their run."""
  config, workdir = tmp_path / "tiny.py", tmp_path / "run"
  config.write_text(CONFIG)
  started = runs.start(config, workdir, processes=2)
  try:
    runs.wait_for(workdir, "step 50", started)
    yield started, workdir
  finally:
    runs.kill(started)


def test_sigterm_to_one_stops_both_at_one_step_with_the_state_saved(two):
  started, workdir = two
  started[1].send_signal(signal.SIGTERM)
  assert [p.wait(60) for p in started] == [75, 75], runs.output(workdir)
  log = runs.log(workdir).read_text()
  step = re.search(r"^stopped .* SIGTERM at step ([\d,]+)", log, re.M)[1]
  # A checkpoint has the shards of both.
  (saved,) = (workdir / "checkpoints").iterdir()
  assert saved.name == step.replace(",", "")
  record = json.loads((workdir / "process.json").read_text())
  assert record["how"].startswith("stopped by SIGTERM at step")
  assert "stopped" not in runs.output(workdir, 1)


@pytest.mark.parametrize(
  "dead, sent",
  [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)],
)
def test_a_death_ends_the_other_with_the_code_and_message_of_jax(
  two, dead, sent
):
  started, workdir = two
  os.kill(started[dead].pid, sent)
  # The timeout is 5 s; jax checks for missing heartbeats at intervals.
  assert started[1 - dead].wait(60) == -signal.SIGABRT  # 134 in a shell
  log = runs.log(workdir, 1 - dead).read_text(errors="replace")
  message = (
    r"tasks are unhealthy \(stopped sending heartbeats\):\n1\n"
    if dead == 1
    else "Failed to send RPC to coordination service"
  )
  assert re.search(message, log), log[-3000:]
