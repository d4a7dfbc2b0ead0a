"""Checkpoints: exact, asynchronous, on other devices, of parameters alone."""

import pwd

import jax
import numpy as np
import pytest
import tiny
from etils import epath
from faults.saved import made_up

from vit_jax import sharding
from vit_jax.checkpointing import checkpointer
from vit_jax.config import CheckpointConfig, ConfigError

META = {
  "step": 2,
  "grid": [2, 2],
  "class_names": ["\\n", "é", "猫"],
  "flops": 3 * 10**24,
}


def _equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with a checkpoint of step 2, its parts, and its state.

  Its owner has no name, as in a container that runs under a number of its
  host's.
  """

  def unknown(number):
    raise KeyError(f"uid not found: {number}")

  folder = tmp_path_factory.mktemp("run")
  config = tiny.config(optim__ema_decay=0.9, mesh__data=2, mesh__fsdp=2)
  parts = tiny.Parts(config, jax.devices()[:4])
  state, saver = made_up(parts.shapes, 0), _saver(folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pwd, "getpwuid", unknown)
    saver.save(2, state, META)
    saver.close()
  assert checkpointer.verify(epath.Path(folder / "checkpoints/2")) is None
  return folder, parts, state


def _saver(folder):
  return checkpointer.Checkpointer(str(folder), CheckpointConfig())


def _restored(folder, parts):
  loader = _saver(folder)
  try:
    return loader.restore(2, parts.shapes)
  finally:
    loader.close()


def test_restores_the_same_bits(saved):
  folder, parts, state = saved
  assert _saver(folder).steps() == [2]
  restored = _restored(folder, parts)
  _equal(state, restored)
  got = jax.tree.map(lambda x: x.sharding, restored)
  shardings = sharding.infer(parts.shapes, parts.mesh, parts.config.model)
  assert jax.tree.leaves(got) == jax.tree.leaves(shardings)
  # On another mesh.
  one = tiny.Parts(tiny.config(optim__ema_decay=0.9), jax.devices()[:1])
  _equal(state, _restored(folder, one))


@pytest.mark.nightly
@pytest.mark.parametrize(
  "name",
  ["muon", "lamb", "lion", "adafactor", "optax:lars", "optax:contrib.prodigy"],
)
def test_a_restored_optimizer_goes_on_to_the_same_bits(name, tmp_path):
  config = tiny.config(
    optim__name=name,
    optim__accumulator_dtype="bfloat16",
    model__scan=name == "muon",
    mesh__fsdp=2,
    mesh__data=4,
  )
  parts = tiny.Parts(config)
  state, _ = parts.run(2)
  saver = _saver(tmp_path)
  saver.save_now(2, state, META)
  restored = saver.restore(2, parts.shapes)
  saver.close()
  _equal(parts.run(2, state)[0], parts.run(2, restored)[0])


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/2"])
def test_parameters_alone_as_numpy(saved, inside):
  folder, _, state = saved
  params, metadata = checkpointer.load_params(str(folder / inside))
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
  _equal(state.eval_params, params)
  assert metadata == META


def test_another_model_is_refused(saved):
  other = tiny.Parts(tiny.config(model__mlp_dim=32))
  with pytest.raises(ConfigError) as e:
    _restored(saved[0], other)
  (error,) = e.value.errors
  block = "Transformer/encoderblock_0/MlpBlock_0"
  assert f"{block}/Dense_0/kernel is float32[32,64]" in error
  # Two blocks: both kernels, one bias.
  assert error.count("expected float32") == 6
  other = tiny.Parts(tiny.config(optim__name="sgd"))
  with pytest.raises(ConfigError, match="config.optim"):
    _restored(saved[0], other)


def test_a_folder_without_checkpoint(tmp_path):
  with pytest.raises(FileNotFoundError, match="no checkpoint"):
    checkpointer.find(str(tmp_path))
  with pytest.raises(FileNotFoundError, match="does not exist"):
    checkpointer.find(str(tmp_path / "nowhere"))
