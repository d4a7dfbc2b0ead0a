"""A tiny DINOv3 from training to export, on eight devices."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from planning.test_planner import needs_libtpu

import vit_jax
from configs import glyphs
from vit_jax.callbacks import Callback, Stop
from vit_jax.config import freeze
from vit_jax.tools.exporting import convert, onnx
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 40
PARTS = {
  "name": "modern",
  "registers": 4,
  "rope": "dinov3",
  "posemb": "none",
  "mlp": "swiglu",
  "layer_scale": 0.1,
  "pool": "token",
}


class StopAt(Callback):
  """Stops a run after a step."""

  def __init__(self, step: int):
    self._step = step

  def check_stop(self, step):
    if step == self._step:
      raise Stop("the test")


def config():
  c = glyphs.get_config()
  c.model.update(PARTS)
  c.model.width, c.model.depth, c.model.mlp_dim = 32, 2, 48
  c.data.dataset, c.data.batch_size = "digits", 32
  c.data.ops = "decode|resize(16)"
  c.total_steps, c.optim.warmup_steps, c.log_steps = STEPS, 4, 5
  c.optim.lr = 5e-3
  c.mesh.fsdp = c.mesh.tensor = 2
  few = {"ops": c.data.ops, "baselines": False, "shots": (5,), "l2": (16.0,)}
  c.evals = {"fewshot": c.evals["fewshot"] | few}
  return c


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("parts"))
  return workdir, train_and_evaluate(freeze(config()), workdir)


@pytest.mark.nightly
def test_it_learns_is_scored_and_goes_on_to_the_bit(run, tmp_path):
  workdir, state = run
  rows = read_metrics(workdir)
  losses = [r["train/loss"] for r in rows if "train/loss" in r]
  assert losses[0] == pytest.approx(np.log(10), abs=1e-4)
  assert losses[-1] < losses[0] - 0.2
  (score,) = (r["fewshot/5shot"] for r in rows if "fewshot/5shot" in r)
  assert score > 0.3  # of ten digits
  gate = state.params["Transformer"]["encoderblock_0"]["MlpBlock_0"]["Gate"]
  assert gate["kernel"].sharding.shard_shape((32, 48)) == (16, 24)
  with pytest.raises(Stop):
    train_and_evaluate(
      freeze(config()), str(tmp_path), callbacks=[StopAt(STEPS // 2)]
    )
  again = train_and_evaluate(freeze(config()), str(tmp_path))
  assert int(again.step) == STEPS
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


@pytest.mark.nightly
def test_its_checkpoint_is_read_inspected_and_exported(run, tmp_path):
  for name in onnx.PACKAGES:
    pytest.importorskip(name)
  vit = vit_jax.load(run[0], verbose=False)
  assert {k: getattr(vit.config, k) for k in PARTS} == PARTS
  images = np.random.default_rng(0).uniform(-1, 1, (3, 16, 16, 3)).astype("f")
  logits = np.asarray(vit(images)[0])
  maps = vit.attention_map(images)
  np.testing.assert_allclose(maps.sum((1, 2)), 1, rtol=1e-5)
  dst = str(tmp_path / "vit.onnx")
  with jax.numpy_rank_promotion("allow"):
    convert.convert(vit, dst, "onnx")
  np.testing.assert_allclose(
    onnx.read(dst)(images), logits, rtol=0, atol=2e-5 * np.abs(logits).max()
  )
  # Rotations fit any grid, so that nothing is resized.
  larger = vit_jax.load(run[0], image_size=(24, 40), verbose=False)
  assert not larger.report.resized and not larger.report.reinitialised
  with pytest.raises(ValueError, match="positions rotate queries and keys"):
    vit_jax.models.inspection.position_table(vit.config, vit.params, (16, 16))


@pytest.mark.slow
@needs_libtpu
def test_its_plan_is_made():
  flags = [f"--config.model.{k}={v}" for k, v in PARTS.items()]
  done = subprocess.run(
    [
      *(sys.executable, "-m", "vit_jax", "plan", "--config=configs/glyphs.py"),
      *("--topology=v5e:2x4", "--json", "--config.num_classes=92"),
      *(*flags, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
    ],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stderr
  plan = json.loads(done.stdout)
  assert plan["fits"] and plan["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
