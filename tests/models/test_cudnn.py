"""cuDNN's attention is used only where a trial of it has worked.

These tests need no GPU: XLA's attention stands in for cuDNN's.
"""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from vit_jax import experiment, run_summary, sharding
from vit_jax.models import cudnn
from vit_jax.models.efficient_attention import attend
from vit_jax.models.encoder import MultiHeadDotProductAttention

SIZES = (9, 2, 8, "bfloat16")
PLAIN = jax.nn.dot_product_attention


@pytest.fixture(autouse=True)
def fresh_cache():
  cudnn.why_not.cache_clear()
  yield
  cudnn.why_not.cache_clear()


def in_its_place(monkeypatch, factor=1.0):
  def attend(query, key, value, *, implementation, **options):
    made.append((implementation, query.shape))
    options["implementation"] = "xla"
    return factor * PLAIN(query, key, value, **options)

  made = []
  monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
  return made


def test_where_it_cannot_be_used(monkeypatch):
  assert "cuDNN" in cudnn.why_not(*SIZES)  # a CPU has none
  cudnn.why_not.cache_clear()
  in_its_place(monkeypatch)
  assert cudnn.why_not(*SIZES) == ""
  assert "float32" in cudnn.why_not(9, 2, 8, "float32")


def test_gradients_are_cudnn_s_for_any_number_of_tokens(monkeypatch):
  """The program for a GPU, with the answers that jax would get from the GPU."""
  # jax offers no public way to these answers on a machine without a GPU.
  jax_s = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
  monkeypatch.setattr(jax_s, "check_cudnn_version", lambda: 91300)
  monkeypatch.setattr(jax_s, "check_compute_capability", lambda _: True)
  monkeypatch.setattr(
    jax_s, "is_cuda_compute_capability_equal", lambda _: False
  )
  x = jax.ShapeDtypeStruct((2, 197, 16, 80), jnp.bfloat16)

  def gradients(query, key, value, weights):
    return jax.vjp(cudnn.attend, query, key, value)[1](weights)

  traced = jax.jit(gradients).trace(x, x, x, x)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert re.findall(r"@(__cudnn\$\w+)", text) == [
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
  ]


def test_numbers_do_not_depend_on_the_token_that_is_added(monkeypatch):
  in_its_place(monkeypatch)
  numbers = np.random.default_rng(0).normal(size=(4, 2, 9, 2, 8))
  *inputs, weights = jnp.asarray(numbers, jnp.float32)
  got = cudnn.output_and_gradients(cudnn.attend, inputs, weights)
  want = cudnn.output_and_gradients(PLAIN, inputs, weights)
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  "num_heads, of_each", [pytest.param(4, 2, marks=pytest.mark.slow), (3, 3)]
)
def test_devices_along_an_axis_of_xla_s_have_their_share_of_the_heads(
  monkeypatch, num_heads, of_each
):
  """jax cannot split cuDNN's call in a mesh that is manual in part."""
  made = in_its_place(monkeypatch)
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
  numbers = np.random.default_rng(0).normal(size=(3, 4, 10, num_heads, 8))
  inputs = jnp.asarray(numbers, jnp.float32)
  fn = jax.shard_map(
    cudnn.attend,
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P("data"),
    axis_names={"data"},
    check_vma=False,
  )
  got = jax.jit(fn)(*inputs)
  assert made == [("cudnn", (2, 10, of_each, 8))]
  np.testing.assert_allclose(got, PLAIN(*inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  "factor, reason", [(1.1, "differs by 10"), (np.nan, "differs by nan")]
)
def test_numbers_that_are_off(monkeypatch, factor, reason):
  wrong = lambda q, k, v: factor * attend(q, k, v, False)
  monkeypatch.setattr(cudnn, "attend", wrong)
  assert reason in cudnn.why_not(*SIZES)


def test_the_model_takes_it_on_a_gpu(monkeypatch):
  made = in_its_place(monkeypatch)
  module = MultiHeadDotProductAttention(2, jnp.bfloat16)
  x = np.random.default_rng(0).normal(size=(4, 9, 16))
  x = jnp.asarray(x, jnp.bfloat16)
  params = jax.jit(module.init)(jax.random.key(0), x, x)

  def apply():
    return jax.jit(tiny.in_step(lambda p, x: module.apply(p, x, x)))(params, x)

  want = apply()
  assert not made
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  got = apply()
  by_cudnn = [
    shape for implementation, shape in made if implementation == "cudnn"
  ]
  # Beside the trial; 9 tokens and one more.
  assert (4, 10, 2, 8) in by_cudnn
  scale = np.max(np.abs(np.asarray(want, "f")))
  np.testing.assert_allclose(
    np.asarray(got, "f"), np.asarray(want, "f"), atol=scale * 2**-6
  )


def test_a_run_says_which(monkeypatch):
  config = tiny.config(model__dtype="bfloat16")
  parts = tiny.Parts(config, jax.devices()[:1])
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  run = experiment.Experiment(config, "runs/x", data=tiny.Data())
  text = functools.partial(run_summary.text, run, mesh, parts.shapes)
  assert "attention   " not in text()
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  assert "\nattention   XLA (" in text()
  in_its_place(monkeypatch)
  cudnn.why_not.cache_clear()
  assert "\nattention   cuDNN\n" in text()
