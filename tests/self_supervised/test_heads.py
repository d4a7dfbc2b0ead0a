"""DINO's head as the authors'; a network on crops of several sizes."""

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
import tiny

from vit_jax.models import build
from vit_jax.self_supervised import heads

FILE = methods.published()


def _params(head, kind, has_gain):
  """The authors' parameters, or gradients, under our names."""
  stored = lambda name: jnp.float32(FILE[f"{head}/{kind}/{name}"])
  linear = {"head3": ["mlp.0", "mlp.2", "mlp.4"], "head1": ["mlp"]}[head]
  params = {
    f"Dense_{i}": {
      "kernel": stored(f"{name}.weight").T,
      "bias": stored(f"{name}.bias"),
    }
    for i, name in enumerate(linear)
  }
  params["prototypes"] = {"kernel": stored("last_layer.weight_v").T}
  if has_gain:
    gain = stored("last_layer.weight_g")[:, 0]
    params["prototypes"]["gain"] = {"kernel": gain}
  return params


def _module(head, has_gain):
  layers = {"head3": 3, "head1": 1}[head]
  return heads.DINOHead(28, 32, 12, layers, has_gain=has_gain)


@pytest.mark.parametrize("head", ["head3", "head1"])
def test_it_is_the_authors_head(head):
  """Values, and gradients of inputs and parameters."""
  x, cotangent = map(
    jnp.float32, (FILE[f"{head}/x"], FILE[f"{head}/cotangent"])
  )
  params = _params(head, "param", True)

  @jax.jit
  def value_and_grads(params, x):
    apply = lambda p, x: _module(head, True).apply({"params": p}, x)
    y, back = jax.vjp(apply, params, x)
    return y, back(cotangent)

  y, (of_params, of_x) = value_and_grads(params, x)
  np.testing.assert_allclose(y, FILE[f"{head}/y"], rtol=1e-5, atol=1e-5)
  wanted = (_params(head, "grad", True), np.float32(FILE[f"{head}/grad_x"]))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
    (of_params, of_x),
    wanted,
  )
  params = _params(head, "param", False)
  fixed = _module(head, False).apply({"params": params}, x)
  np.testing.assert_allclose(fixed, FILE[f"{head}/y_g1"], rtol=1e-5, atol=1e-5)


def test_it_starts_as_the_authors():
  module = heads.DINOHead(512, 256, 64, has_gain=True)
  init = jax.jit(module.init)
  params = init(jax.random.key(0), jnp.zeros((1, 128)))["params"]
  for i in range(3):
    # 16,384 numbers or more.
    dense = params[f"Dense_{i}"]
    assert np.std(dense["kernel"]) == pytest.approx(0.02, rel=0.03)
    assert not dense["bias"].any()
  prototypes = params["prototypes"]
  limit = 64**-0.5
  assert 0.99 * limit < np.abs(prototypes["kernel"]).max() <= limit
  assert np.std(prototypes["kernel"]) == pytest.approx(limit / 3**0.5, rel=0.02)
  assert (prototypes["gain"]["kernel"] == 1).all()


def test_a_vector_of_zeros_has_finite_gradients():
  grad = jax.jit(jax.grad(lambda x: heads.unit(x).sum()))(jnp.zeros(3))
  assert np.isfinite(heads.unit(jnp.zeros(3))).all() and np.isfinite(grad).all()
  np.testing.assert_allclose(heads.unit(jnp.array([3.0, 4.0])), [0.6, 0.8])


NIGHTLY = pytest.mark.nightly
MODELS = {
  "vit": {},
  "scan": dict(model__scan=True),
  "modern": dict(
    model__name="modern",
    model__rope="dinov3",
    model__registers=2,
    model__posemb="none",
    model__layer_scale=0.1,
  ),
  "gap": dict(model__pool="gap", model__posemb="sincos2d"),
  "map": dict(model__pool="map"),
  "resnet": tiny.RESNET,
}


def _network(**changes):
  model = tiny.config(**changes).model
  head = heads.DINOHead(12, 16, 8, name="dino")
  module = heads.MultiCrop(build(model, 0), head, model, (32, 32))
  return model, module, methods.params_of(module, 32)


@pytest.mark.parametrize(
  "name", ["vit", *(pytest.param(n, marks=NIGHTLY) for n in [*MODELS][1:])]
)
def test_crops_of_two_sizes_pass_one_network(name):
  """The network's parameters are at the root; the vector is what it pools."""
  model, module, params = _network(**MODELS[name])
  plain = build(model, 0)
  own = params.pop("dino")
  # Drawn by path and shape: none is elsewhere.
  like = methods.params_of(plain, 32)
  jax.tree.map(np.testing.assert_array_equal, params, like)
  rng = np.random.default_rng(0)
  scores = jax.jit(
    lambda p, x: module.apply({"params": p}, x, None, method="scores")
  )
  for side in (32, 16):
    images = jnp.float32(rng.uniform(-1, 1, (2, side, side, 3)))
    got, vectors = scores({**params, "dino": own}, images)
    assert got.shape == (2, 12) and np.isfinite(got).all()
    if side == 32:
      _, out = jax.jit(plain.apply)({"params": params}, images)
      np.testing.assert_allclose(vectors, out["pooled"], atol=1e-5)


@pytest.mark.slow
def test_each_crop_has_its_own_noise():
  """A crop's noise depends on its record's number and its own, not on rows."""
  _, module, params = _network(model__stochastic_depth=0.6, model__dropout=0.3)
  image = np.random.default_rng(0).uniform(-1, 1, (1, 16, 16, 3))
  images = jnp.asarray(np.repeat(image, 6, 0), jnp.float32)
  records = heads.crop_records(jnp.array([5, 9]), 2, 3, 10)
  assert len({*records.tolist()}) == 6
  options = dict(rngs={"dropout": jax.random.key(1)}, method="vectors")
  of_params = {"params": params}
  apply = jax.jit(lambda x, r: module.apply(of_params, x, r, **options))
  vectors = np.asarray(apply(images, records))
  assert len({*vectors[:, 0].tolist()}) == 6
  turned = apply(images, records[::-1])[::-1]
  np.testing.assert_allclose(turned, vectors, atol=1e-6)
