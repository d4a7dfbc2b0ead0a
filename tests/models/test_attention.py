"""Attention in training: its gradient, chunks of images, and cuDNN's program.

The formula itself is in test_transformer.py. The tests of cuDNN need no GPU:
XLA's attention stands in for cuDNN's.
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

from vit_jax.config import model_config
from vit_jax.models import cudnn
from vit_jax.models.attention import dot_product_attention
from vit_jax.models.chip_choices import CHOICES, Choices
from vit_jax.models.efficient_attention import (
  attend,
  describe_implementation,
)
from vit_jax.models.encoder import (
  PLACES,
  EncoderBlock,
  MultiHeadDotProductAttention,
)
from vit_jax.models.noise import draw_all

QKV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 9, 2, 4)), "f")
TOKENS = QKV.reshape(3, 6, 9, 8)[0]
each_program = pytest.mark.parametrize("save_weights", [True, False])


def loss(fn, *args):
  return lambda qkv: jnp.sum(jnp.sin(fn(*qkv, *args).astype("f")))


def test_scores_are_float32_in_bfloat16():
  # Scores of 200 and 200.5, over sqrt(2): bfloat16 has steps of 1 there, and
  # would make the weights equal.
  query = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  key = jnp.asarray([[200, 0], [200, 0.5]], jnp.bfloat16).reshape(1, 2, 1, 2)
  value = jnp.asarray([[0, 0], [1, 1]], jnp.bfloat16).reshape(1, 2, 1, 2)
  (got, _) = dot_product_attention(query, key, value).ravel()
  expected = 1 / (1 + np.exp(-0.5 / 2**0.5))
  assert float(got) == pytest.approx(expected, abs=2**-8)


@each_program
def test_the_gradient_is_that_of_the_formula(save_weights):
  plain = loss(dot_product_attention)
  want = jax.jit(jax.value_and_grad(plain))(QKV)
  fn = loss(attend, save_weights)
  got = jax.jit(jax.value_and_grad(fn))(QKV)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  # Rounding of sums over 9 keys.
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
  # The backward pass gets the weights only where they are saved.
  saved = jax.eval_shape(lambda qkv: jax.vjp(fn, qkv)[1], QKV)
  largest = max(x.size for x in jax.tree.leaves(saved))
  assert (largest >= 6 * 2 * 9 * 9) == save_weights


@pytest.mark.slow
@each_program
def test_the_gradient_in_bfloat16_is_as_good(save_weights):
  """Its error against float32 is that of autodiff in bfloat16, or less."""

  # Without the barrier, XLA for CPUs (jax 0.12) picks a product it lacks.
  def loss(fn, *args):
    barrier = jax.lax.optimization_barrier
    rounded = lambda qkv: barrier(fn(*qkv, *args)).astype("f")
    return lambda qkv: jnp.sum(jnp.sin(rounded(qkv)))

  exact = jax.jit(jax.grad(loss(dot_product_attention)))(QKV)
  half = QKV.astype(jnp.bfloat16)

  def error(fn, *args):
    got = jax.jit(jax.grad(loss(fn, *args)))(half)
    return jnp.sqrt(jnp.mean((got.astype("f") - exact) ** 2))

  auto = error(dot_product_attention)
  assert auto > 1e-3
  assert error(attend, save_weights) < 1.1 * auto


# A block in chunks of images, on chips where that is faster.


def num_products(fn, *args) -> int:
  equations = tiny.equations(jax.make_jaxpr(fn)(*args).jaxpr)
  return sum(e.primitive.name == "dot_general" for e, _ in equations)


def block():
  """Returns a loss of a block, and the arguments at which it is taken."""
  options = model_config(
    "vit",
    width=8,
    depth=1,
    num_heads=2,
    mlp_dim=8,
    dropout=0.5,
    pool="gap",
    posemb="relative",
  )
  module = EncoderBlock(options, (3, 3))
  init = lambda key: module.init(key, TOKENS, None, {}, None)
  shapes = jax.eval_shape(init, jax.random.key(0))
  numbers = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda x: numbers.normal(0, 0.3, x.shape).astype("f"), shapes
  )
  places = {place: (9, 8) for place in ("attention", "hidden", "mlp")}
  places["skip_attention"] = (1, 1)
  keys = jax.random.split(jax.random.key(1), 1)
  draws = draw_all(keys, jnp.arange(6), PLACES, places)
  draws = jax.tree.map(lambda x: x[0], draws)

  def loss(variables, tokens, draws):
    rate = jnp.float32(0.5)
    tokens, out = module.apply(variables, tokens, rate, draws, None)
    return jnp.sum(jnp.sin(tokens)), out

  return loss, (variables, TOKENS, draws)


@pytest.mark.slow
def test_chunks_give_the_numbers_of_the_whole(monkeypatch):
  """Two chunks of 6 images, each with 2 heads x 9 x 9 scores."""
  loss, args = block()
  grad = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))
  want = grad(loss)(*args)
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=5 * 162))
  got = grad(tiny.in_step(loss))(*args)
  # The same products of the same numbers, in kernels for other numbers of
  # rows, and sums over images in another order: roundings of terms that are at
  # most as large as the largest number. What should be zero, as the gradient of
  # the key's bias, is rounding alone.
  for a, b in zip(got, want, strict=True):
    largest = max(np.abs(x).max() for x in jax.tree.leaves(b))
    close = functools.partial(np.testing.assert_allclose, atol=1e-6 * largest)
    jax.tree.map(close, a, b)


def test_chunks_only_in_a_step_on_such_a_chip(monkeypatch):
  """Elsewhere images may be spread over devices, or their number be unknown."""
  fn, args = block()
  whole = num_products(fn, *args)
  assert num_products(tiny.in_step(fn), *args) == whole
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=1))
  assert num_products(tiny.in_step(fn), *args) > 3 * whole  # each of six images
  assert num_products(fn, *args) == whole


# cuDNN's attention is used only where a trial of it has worked.

SIZES = (9, 2, 8, "bfloat16")
PLAIN = jax.nn.dot_product_attention


@pytest.fixture
def stand_in(monkeypatch):
  """Puts XLA's attention in the place of cuDNN's; the calls are listed."""
  why_not, made = cudnn.why_not, []  # a test may put another in its place
  why_not.cache_clear()

  def attend(query, key, value, *, implementation, **options):
    made.append((implementation, query.shape))
    return PLAIN(query, key, value, implementation="xla", **options)

  monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
  yield made
  why_not.cache_clear()


def test_where_cudnn_cannot_be_used(monkeypatch):
  cudnn.why_not.cache_clear()
  assert "cuDNN" in cudnn.why_not(*SIZES)  # a CPU has none
  for factor, reason in (1.1, "differs by 10"), (np.nan, "differs by nan"):
    cudnn.why_not.cache_clear()
    off = lambda q, k, v, by=factor: by * attend(q, k, v, False)
    monkeypatch.setattr(cudnn, "attend", off)
    assert reason in cudnn.why_not(*SIZES)
  cudnn.why_not.cache_clear()


def test_where_cudnn_can_be_used(stand_in):
  assert cudnn.why_not(*SIZES) == ""
  assert "float32" in cudnn.why_not(9, 2, 8, "float32")
  # The numbers do not depend on the token that is added.
  numbers = np.random.default_rng(0).normal(size=(4, 2, 9, 2, 8))
  *inputs, weights = jnp.asarray(numbers, jnp.float32)
  got = cudnn.output_and_gradients(cudnn.attend, inputs, weights)
  want = cudnn.output_and_gradients(PLAIN, inputs, weights)
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize(
  "num_heads, of_each", [pytest.param(4, 2, marks=pytest.mark.slow), (3, 3)]
)
def test_devices_along_an_axis_of_xla_s_have_their_share_of_the_heads(
  stand_in, num_heads, of_each
):
  """jax cannot split cuDNN's call in a mesh that is manual in part."""
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
  assert stand_in == [("cudnn", (2, 10, of_each, 8))]
  np.testing.assert_allclose(got, PLAIN(*inputs), rtol=1e-6, atol=1e-6)


def test_the_model_takes_it_on_a_gpu(monkeypatch, stand_in):
  module = MultiHeadDotProductAttention(2, jnp.bfloat16)
  x = np.random.default_rng(0).normal(size=(4, 9, 16))
  x = jnp.asarray(x, jnp.bfloat16)
  params = jax.jit(module.init)(jax.random.key(0), x, x)

  def apply():
    return jax.jit(tiny.in_step(lambda p, x: module.apply(p, x, x)))(params, x)

  want = apply()
  assert not stand_in
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  got = apply()
  # Beside the trial; 9 tokens and one more.
  assert ("cudnn", (4, 10, 2, 8)) in stand_in
  scale = np.max(np.abs(np.asarray(want, "f")))
  np.testing.assert_allclose(
    np.asarray(got, "f"), np.asarray(want, "f"), atol=scale * 2**-6
  )
  # What a run prints.
  model = tiny.config(model__dtype="bfloat16").model
  assert describe_implementation(model, (16, 16), "cpu") == "cuDNN"
  assert describe_implementation(model, (16, 16), "tpu") == ""
  monkeypatch.setattr(cudnn, "why_not", lambda *_: "too old")
  assert describe_implementation(model, (16, 16), "cpu") == "XLA (too old)"
