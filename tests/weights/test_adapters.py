"""Runs with adapters: checkpoints, resuming, the base, and what loads them."""

import dataclasses
import shutil

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax import train
from vit_jax.batch import normalise
from vit_jax.checkpointing import checkpointer
from vit_jax.config import ConfigError
from vit_jax.finetune import lora_base
from vit_jax.tools.exporting import convert
from vit_jax.weights import google, source_file
from vit_jax.weights.weights_file import Weights, lazy

IMAGES = normalise(jnp.asarray(tiny.batch(0, tiny.config())["image"]))


def _config(folder, **changes):
  return tiny.config(
    init=str(folder / "base.npz"),
    lora__rank=2,
    lora__alpha=8.0,
    lora__targets=("query", "out", "Dense_1"),
    mesh__fsdp=2,
    mesh__data=4,
    optim__ema_decay=0.5,
    checkpoint__every_steps=2,
    **{"total_steps": 4, **changes},
  )


def _write_base(path, seed=3):
  """A model of 7 classes, so that the run has a head of its own."""
  module = tiny.ViT(7, 8, width=32, depth=2, mlp_dim=64, num_heads=4)
  params = module.init(jax.random.key(seed), IMAGES)["params"]
  np.savez(path, **google.write(flatten_dict(jax.device_get(params), sep="/")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lora")
  _write_base(folder / "base.npz")
  state = train.train_and_evaluate(
    _config(folder), str(folder / "run"), tiny.Data()
  )
  return folder, state


@pytest.mark.slow
def test_a_run_has_the_adapters_and_loads_with_its_base(run):
  folder, state = run
  params, metadata = checkpointer.load_params(str(folder / "run"))
  flat = flatten_dict(params, sep="/")
  assert {k.rpartition("/")[2] for k in flat if "head" not in k} == {
    "lora_a",
    "lora_b",
  }
  of_kernels = 2 * 2 * (32 + 32) * 2 + 2 * 2 * (64 + 32)
  assert sum(x.size for x in flat.values()) == of_kernels + 32 * 10 + 10
  assert metadata["base"]["path"] == str(folder / "base.npz")
  base = vit_jax.load(folder / "base.npz", verbose=False).params
  count = sum(x.size for x in jax.tree.leaves({**base, "head": ()}))
  assert metadata["num_params"] == count + 32 * 10 + 10
  vit = vit_jax.load(folder / "run", verbose=False)
  assert vit.num_classes == tiny.NUM_CLASSES
  parts = tiny.Parts(_config(folder))
  images = jnp.asarray(tiny.batch(0, parts.config)["image"])
  want, _ = parts.trainer.predict(state.eval_params, images)
  np.testing.assert_allclose(vit(IMAGES)[0], want, rtol=1e-5, atol=1e-5)
  assert any("merged into" in note for note in vit.report.notes)
  # peft's files of it are the same model.
  adapter = folder / "adapter"
  convert.convert(vit, str(adapter), "peft")
  again = flatten_dict(vit_jax.load(adapter, verbose=False).params, sep="/")
  for name, array in flatten_dict(vit.params, sep="/").items():
    np.testing.assert_array_equal(again[name], array, name)


def test_a_base_has_positions_and_a_tanh_layer_of_its_own():
  """The run has neither its size of images nor its tanh layer."""

  def draw(**options):
    model = dataclasses.replace(tiny.config().model, **options)
    params = foreign.random_params(model, 7, (32, 32))
    return {k: lazy(v) for k, v in params.items()}

  base = Weights(
    "/base",
    "hf",
    draw(pre_logits=True),
    grid=(4, 4),
    has_cls_row=True,
    posemb_filter="hf",
  )
  stated = source_file.of_weights(base, None)._asdict()
  weights = Weights(
    "run",
    "checkpoint",
    {k: v for k, v in draw().items() if k.startswith("head/")},
    {"pre_logits": False},
    metadata={"base": stated, "config": {"model": {}, "lora": {"rank": 2}}},
  )
  read = lora_base.on_base(weights, lambda path, mean: base)
  assert read.params.keys() == draw().keys()
  assert read.posemb_filter == "hf"


@pytest.mark.nightly
def test_it_resumes_to_the_same_bits(run, tmp_path):
  folder, state = run
  shutil.copytree(folder / "run", tmp_path / "run")
  shutil.rmtree(tmp_path / "run/checkpoints/4")
  again = train.train_and_evaluate(
    _config(folder), str(tmp_path / "run"), tiny.Data()
  )
  jax.tree.map(np.testing.assert_array_equal, state, again)


@pytest.mark.slow
def test_another_base_or_none_is_an_error(run, tmp_path):
  folder, _ = run
  shutil.copytree(folder / "run", tmp_path / "run")
  path, base = tmp_path / "run", folder / "base.npz"
  config = _config(folder, total_steps=6)
  resume = lambda: train.train_and_evaluate(
    config, str(path), tiny.Data(), allow_change=["total_steps"]
  )
  base.rename(folder / "away.npz")
  try:
    with pytest.raises(FileNotFoundError, match="adapters of .*base.npz'"):
      vit_jax.load(path)
    with pytest.raises(ConfigError, match="config.init: .*does not exist"):
      resume()
    _write_base(base, seed=4)
    with pytest.raises(ValueError, match="got digest .* of its arrays"):
      vit_jax.load(path)
    with pytest.raises(ConfigError, match="config.init: .*got digest"):
      resume()
  finally:
    (folder / "away.npz").rename(base)
  with pytest.raises(ConfigError, match="config.init: got None beside"):
    train.train_and_evaluate(
      tiny.config(lora__rank=2), str(tmp_path / "new"), tiny.Data()
    )
