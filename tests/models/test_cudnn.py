"""cuDNN's attention is used only where a trial of it has worked.

These tests need no GPU: XLA's attention stands in for cuDNN's.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from vit_jax import sharding
from vit_jax.models import attention_by_chip, cudnn
from vit_jax.models.attention import MultiHeadDotProductAttention
from vit_jax.runtime import prepare, run_info

SIZES = (9, 2, 8, "bfloat16")
PLAIN = jax.nn.dot_product_attention


@pytest.fixture(autouse=True)
def forgotten():
  cudnn.fault.cache_clear()
  yield
  cudnn.fault.cache_clear()


def in_its_place(monkeypatch, factor=1.0):
  def attend(query, key, value, *, implementation):
    made.append(implementation)
    return factor * PLAIN(query, key, value, implementation="xla")

  made = []
  monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
  return made


def test_without_cudnn_it_says_so():
  assert "cuDNN" in cudnn.fault(*SIZES)


def test_the_type_that_it_has_not():
  assert cudnn.fault(9, 2, 8, "float32") == "cuDNN's attention has no float32"


def test_it_works(monkeypatch):
  assert in_its_place(monkeypatch) == []
  assert cudnn.fault(*SIZES) == ""


def test_numbers_that_are_off(monkeypatch):
  monkeypatch.setattr(
    cudnn,
    "attend",
    lambda q, k, v: 1.1 * attention_by_chip.attend(q, k, v, False),
  )
  in_its_place(monkeypatch)
  assert "off by 10" in cudnn.fault(*SIZES)


def test_not_a_number(monkeypatch):
  monkeypatch.setattr(
    cudnn,
    "attend",
    lambda q, k, v: jnp.nan * attention_by_chip.attend(q, k, v, False),
  )
  assert "off by nan" in cudnn.fault(*SIZES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_model_takes_it_on_a_gpu(monkeypatch, dtype):
  made = in_its_place(monkeypatch)
  module = MultiHeadDotProductAttention(2, jnp.dtype(dtype))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 9, 16)), dtype)
  params = jax.jit(module.init)(jax.random.key(0), x, x)
  mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

  def apply():
    fn = lambda p, x: module.apply(p, x, x)
    fn = jax.shard_map(
      fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(fn)(params, x)

  want = apply()
  assert not made
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  got = apply()
  assert ("cudnn" in made) == (dtype == "bfloat16")
  scale = np.max(np.abs(np.asarray(want, "f")))
  np.testing.assert_allclose(
    np.asarray(got, "f"), np.asarray(want, "f"), atol=scale * 2**-6
  )


def test_a_run_says_which(monkeypatch):
  config = tiny.config(model__dtype="bfloat16")
  data = types.SimpleNamespace(
    num_examples=100, num_classes=10, class_names=None
  )
  parts = tiny.Parts(config, jax.devices()[:1])
  params = jax.eval_shape(parts.init, jax.random.key(0)).params
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  run = prepare.Run(config, "runs/x", data=data)
  text = functools.partial(run_info.text, run, mesh, params)
  assert "attention   " not in text()
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  assert "\nattention   XLA (" in text()
  in_its_place(monkeypatch)
  cudnn.fault.cache_clear()
  assert "\nattention   cuDNN\n" in text()
