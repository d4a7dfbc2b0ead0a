"""Whole runs of every objective: killed, on other devices, in two processes."""

import os
import shutil
import signal

import numpy as np
import pytest
from faults import runs

from vit_jax.writers.metric_writer import is_measured, read_metrics

pytestmark = pytest.mark.nightly
STEPS, SAVES = 12, 3
# Plain SGD: Adam makes a step of a gradient that is 0 but for rounding.
CONFIG = """
from vit_jax.config import defaults

def get_config(kind="classification"):
  c = defaults()
  c.total_steps = {steps}
  c.model.variant = "Ti/4"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.dataset, c.data.batch_size = "digits", 24
  c.data.ops = "decode|random_resized_crop(16, 0.3, 1.0)|flip_lr"
  c.optim.name, c.optim.lr, c.optim.schedule = "sgd", 0.005, "constant"
  c.log_steps, c.checkpoint.every_steps = 1, {saves}
  c.objective.kind = kind
  if kind.startswith("dino"):
    c.model.stochastic_depth = 0.2
    c.objective.prototypes, c.objective.hidden = 48, 32
    c.objective.bottleneck, c.objective.local_crops = 16, 2
    c.objective.local_ops = "decode|random_resized_crop(8, 0.1, 0.3)"
    c.optim.weight_decay, c.optim.weight_decay_end = 0.04, 0.4
  if kind == "dinov2":
    c.objective.koleo_group = 12
    c.objective.gram, c.objective.gram_model = 1.0, "teacher"
  if kind == "mae":
    c.objective.decoder_width, c.objective.decoder_depth = 16, 1
    c.objective.decoder_heads = 2
  if kind == "distillation":
    c.objective.teacher, c.objective.mixup = "teacher", 1.0
  return c
"""
KINDS = ("mae", "dino", "dinov2", "distillation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The config, and a classifier that is a teacher."""
  folder = tmp_path_factory.mktemp("runs")
  config = folder / "small.py"
  config.write_text(CONFIG.format(steps=STEPS, saves=SAVES))
  runs.whole(config, folder / "teacher")
  return folder


@pytest.fixture(scope="module", params=KINDS)
def run(request, folder):
  """The config of an objective, and the folder of its whole run."""
  config, workdir = folder / f"small.py:{request.param}", folder / request.param
  runs.whole(config, workdir)
  return config, workdir


def test_killed_three_times_it_ends_in_the_same_bits(run):
  config, whole = run
  workdir = whole.with_name(f"{whole.name}_killed")
  for place in ("step", "save", "input"):
    started = runs.start(config, workdir, acts={0: (place, "SIGKILL")})
    code = runs.finish(started, 300)
    assert code == [-signal.SIGKILL], runs.output(workdir)
  runs.whole(config, workdir)
  assert runs.assert_same(workdir, whole) > 1000


def _values(workdir):
  return {
    (row["step"], key): value
    for row in read_metrics(str(workdir))
    for key, value in row.items()
    if "/" in key and not is_measured(key)
  }


def _assert_close(workdir, other):
  got, want = _values(workdir), _values(other)
  assert got.keys() == want.keys()
  for key, value in got.items():
    # float32, in another order of sums, in twelve steps
    np.testing.assert_allclose(value, want[key], 1e-3, 1e-5, err_msg=str(key))


def test_two_processes_are_one(run):
  config, whole = run
  workdir = whole.with_name(f"{whole.name}_two")
  runs.whole(config, workdir, processes=2)
  _assert_close(workdir, whole)


def test_it_goes_on_on_another_mesh(run):
  config, whole = run
  workdir = whole.with_name(f"{whole.name}_mesh")
  shutil.copytree(whole, workdir)
  for step in (3 * SAVES, STEPS):
    shutil.rmtree(workdir / "checkpoints" / str(step), ignore_errors=True)
  flags = "--xla_force_host_platform_device_count=4"
  started = runs.start(
    config,
    workdir,
    ["--config.mesh.fsdp=2", "--config.mesh.data=2"],
    env={"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"},
  )
  assert runs.finish(started, 300) == [0], runs.output(workdir)
  _assert_close(workdir, whole)
