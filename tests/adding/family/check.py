"""Trains, resumes, scores, plans, exports and loads an MLP-Mixer."""

import dataclasses
import os
import sys
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import vit_jax
from vit_jax import sharding
from vit_jax.config import ConfigError, build, defaults, freeze
from vit_jax.config.checks import errors
from vit_jax.exporting import convert
from vit_jax.families import by_variant
from vit_jax.inference import pretrained
from vit_jax.planning import planner
from vit_jax.reporting import model_figures
from vit_jax.reporting.charts import ChartFiles
from vit_jax.train import train_and_evaluate


def config(steps: int):
  c = defaults()
  c.model.name, c.model.variant = "mixer", "Mixer-Ti/8"
  c.model.tokens_dropout = 0.1
  c.data.dataset, c.fake_data = "cifar10", True
  c.data.ops = "decode|resize(32)"
  c.data.batch_size = 16
  c.mesh.fsdp, c.mesh.tensor = 2, 2
  c.total_steps, c.log_steps, c.checkpoint.every_steps = steps, 1, 2
  c.evals = {
    "few": {
      "kind": "fewshot",
      "ops": "decode|resize(32)",
      "shots": (1,),
      "seeds": (0,),
    }
  }
  return c


def without_attention(workdir: str) -> str:
  """Returns what a model of tokens without attention answers."""
  try:
    vit_jax.load(workdir, verbose=False).attention_map(
      np.zeros((1, 32, 32, 3), np.uint8)
    )
  except ValueError as e:
    return str(e)
  return ""


def shown(loaded: pretrained.Pretrained) -> None:
  """What the model has is drawn, and what it lacks is named."""
  images = np.zeros((2, 32, 32, 3), np.uint8)
  model = model_figures.inspect_model(
    "mx", "mx", loaded, list(images), ["a", "b"]
  )
  filters, *others = model_figures.all_sections([model], ChartFiles(), None, 1)
  assert filters.body and not filters.left_out
  assert {text for part in others for text in part.left_out} == {
    "mx, Mixer-Ti/8 has no positions",
    "mx, Mixer-Ti/8 has no attention",
  }


def main(workdir: str) -> None:
  run = freeze(config(2))
  state = train_and_evaluate(run, workdir)
  kernel = state.params["block_0"]["token_mixing"]["Dense_0"]["kernel"]
  assert tuple(kernel.sharding.spec) == ("fsdp", "tensor")
  longer = dataclasses.replace(run, total_steps=4)
  state = train_and_evaluate(longer, workdir, allow_change=("total_steps",))
  assert int(state.step) == 4

  step, arguments = planner.lower(run, sharding.make_mesh(run.mesh))
  assert "all-gather" in step.lower(*arguments).compile().as_text()

  assert by_variant("Mixer-S/16").variant == "Mixer-S/16"
  assert by_variant("S/16").num_tokens((224, 224)) == 197
  assert "has no attention between patches" in without_attention(workdir)

  images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3))
  loaded = vit_jax.load(workdir, verbose=False)
  logits, _ = loaded(images.astype(np.float32))
  exported = jax.export.deserialize(bytearray(loaded.export()))
  np.testing.assert_allclose(exported.call(images.astype("f")), logits, 1e-5)
  convert.convert(loaded, workdir + "/orbax", "orbax")
  for name, to, text in (
    ("mixer.npz", "npz", "no names in Google's files"),
    ("mixer.safetensors", "timm", "got 'mixer', expected 'bit', 'vit' or"),
  ):
    try:
      convert.convert(loaded, f"{workdir}/{name}", to)
      raise AssertionError("written under no names")
    except ValueError as e:
      assert text in str(e)
    assert not os.path.exists(f"{workdir}/{name}")
  shown(loaded)
  again = vit_jax.load(workdir + "/orbax", verbose=False)
  np.testing.assert_array_equal(again(images.astype("f"))[0], logits)

  wrong = config(2)
  wrong.model.variant, wrong.model.tokens_dropout = "Mixer-Tj/8", 1.5
  texts = "\n".join(errors(freeze(wrong)))
  assert "config.model.variant: got 'Mixer-Tj/8'" in texts
  assert "config.model.tokens_dropout: got 1.5" in texts
  try:
    freeze({"model": {"name": "mixer", "tokens_dropuot": 0.1, "pool": "gap"}})
  except ConfigError as e:
    assert "Did you mean 'tokens_dropout'" in str(e)
    assert "config.model.pool: got 'gap', which config.model.name=mixer" in str(
      e
    )
  assert build({"model": {"name": "mixer"}})[0].model.name == "mixer"


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    main(folder)
  print("ok")
  sys.exit()
