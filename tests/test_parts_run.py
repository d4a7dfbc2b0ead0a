"""A tiny DINOv3 from training to export, on eight devices."""

import jax
import numpy as np
import pytest

import vit_jax
from configs import glyphs
from vit_jax.config import freeze
from vit_jax.tools.exporting import convert, onnx
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

PARTS = {
  "name": "modern",
  "registers": 4,
  "rope": "dinov3",
  "posemb": "none",
  "mlp": "swiglu",
  "layer_scale": 0.1,
  "pool": "token",
}


def config():
  c = glyphs.get_config()
  c.model.update(PARTS)
  c.model.width, c.model.depth, c.model.mlp_dim = 32, 2, 48
  c.data.dataset, c.data.batch_size = "digits", 32
  c.data.ops = "decode|resize(16)"
  c.total_steps, c.optim.warmup_steps, c.log_steps = 40, 4, 5
  c.optim.lr = 5e-3
  c.mesh.fsdp = c.mesh.tensor = 2
  few = {"ops": c.data.ops, "baselines": False, "shots": (5,), "l2": (16.0,)}
  c.evals = {"fewshot": c.evals["fewshot"] | few}
  return freeze(c)


@pytest.mark.nightly
def test_it_learns_is_scored_and_is_exported(tmp_path):
  for name in onnx.PACKAGES:
    pytest.importorskip(name)
  workdir = str(tmp_path / "run")
  state = train_and_evaluate(config(), workdir)
  rows = read_metrics(workdir)
  losses = [r["train/loss"] for r in rows if "train/loss" in r]
  assert losses[0] == pytest.approx(np.log(10), abs=1e-4)
  assert losses[-1] < losses[0] - 0.2
  (score,) = (r["fewshot/5shot"] for r in rows if "fewshot/5shot" in r)
  assert score > 0.3  # of ten digits
  gate = state.params["Transformer"]["encoderblock_0"]["MlpBlock_0"]["Gate"]
  assert gate["kernel"].sharding.shard_shape((32, 48)) == (16, 24)

  vit = vit_jax.load(workdir, verbose=False)
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
  larger = vit_jax.load(workdir, image_size=(24, 40), verbose=False)
  assert not larger.report.resized and not larger.report.reinitialised
