"""Checkpoints: exact, asynchronous, on other devices, of parameters alone."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import sharding
from vit_jax.checkpointing import checkpointer
from vit_jax.config import CheckpointConfig, ConfigError

META = {"step": 2, "grid": [2, 2], "class_names": ["α", "b"]}


def _equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def _made_up(shapes):
  """A state of these shapes and shardings, no two of its numbers alike."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jax.device_put(
      np.asarray(100 * rng.normal(size=x.shape)).astype(x.dtype), x.sharding
    ),
    shapes,
  )


def _saved(folder, config, devices, *, steps=(2,), **options):
  parts = tiny.Parts(config, jax.devices()[:devices])
  state = _made_up(parts.shapes)
  saver = checkpointer.Checkpointer(str(folder), CheckpointConfig(**options))
  for step in steps:
    saver.save(step, state, META)
  saver.close()
  return parts, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  config = tiny.config(optim__ema_decay=0.9, mesh__data=2, mesh__fsdp=2)
  return folder, *_saved(folder, config, 4)


def test_restores_the_same_bits(saved):
  folder, parts, state = saved
  loader = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  assert loader.steps() == [2]
  restored = loader.restore(2, parts.shapes)
  loader.close()
  _equal(state, restored)
  got = jax.tree.map(lambda x: x.sharding, restored)
  shardings = sharding.infer(parts.shapes, parts.mesh, parts.config.model)
  assert jax.tree.leaves(got) == jax.tree.leaves(shardings)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["muon", "lamb", "lion", "adafactor"])
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
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  saver.save_now(2, state, META)
  restored = saver.restore(2, parts.shapes)
  saver.close()
  _equal(parts.run(2, state)[0], parts.run(2, restored)[0])


def test_restores_on_another_mesh(saved):
  folder, _, state = saved
  one = tiny.Parts(tiny.config(optim__ema_decay=0.9), jax.devices()[:1])
  loader = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  restored = loader.restore(2, one.shapes)
  loader.close()
  _equal(state, restored)


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/2"])
def test_parameters_alone_as_numpy(saved, inside):
  folder, _, state = saved
  params, metadata = checkpointer.load_params(str(folder / inside))
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
  _equal(state.eval_params, params)
  assert metadata == META


def test_another_model_is_refused(saved):
  folder, _, _ = saved
  other = tiny.Parts(tiny.config(model__mlp_dim=32))
  loader = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  with pytest.raises(ConfigError) as e:
    loader.restore(2, other.shapes)
  loader.close()
  (error,) = e.value.errors
  block = "Transformer/encoderblock_0/MlpBlock_0"
  assert f"{block}/Dense_0/kernel is float32[32,64]" in error
  # Two blocks: both kernels, one bias.
  assert error.count("expected float32") == 6


def test_another_optimizer_is_refused(saved):
  folder, _, _ = saved
  other = tiny.Parts(tiny.config(optim__name="sgd"))
  loader = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  with pytest.raises(ConfigError, match="train does not fit config.optim"):
    loader.restore(2, other.shapes)
  loader.close()


def test_keeps_the_last_and_every_so_many(tmp_path):
  _saved(
    tmp_path,
    tiny.config(optim__name="sgd", model__depth=1),
    1,
    steps=(2, 3, 4),
    keep_last=1,
    keep_every_steps=2,
  )
  steps = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
  assert steps == [2, 4]


def test_a_folder_without_checkpoint(tmp_path):
  with pytest.raises(FileNotFoundError, match="has no checkpoint in it"):
    checkpointer.find(str(tmp_path))
  with pytest.raises(FileNotFoundError, match="does not exist"):
    checkpointer.find(str(tmp_path / "nowhere"))
