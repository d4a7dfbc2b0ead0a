"""`encode` with a part of the tokens, in both families."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.families import model_config
from vit_jax.models import build
from vit_jax.models.chip_choices import CHOICES, Choices

TINY = dict(variant="B/4", width=32, depth=1, mlp_dim=24, num_heads=2)
SHAPE = 2, 3, 4, 32  # tokens of two images, on a grid of 3 x 4
KEEP = np.array([[5, 0, 11, 2], [1, 4, 7, 10]])
QUICK = [("vit", dict(posemb="relative"))]
SLOW = [
  ("vit", dict(posemb_at="blocks", scan=True)),
  ("modern", dict(registers=3, distilled=True, pre_norm=True)),
  ("modern", dict(posemb="none", rope="dinov3", registers=2)),
  ("modern", dict(posemb="relative_bias", scan=True, layer_scale=0.5)),
]
NIGHTLY = [
  ("vit", dict(scan=True, pool="gap")),
  ("vit", dict(posemb="learn2d", cls_row=False)),
]


@pytest.fixture(
  params=[
    *QUICK,
    *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW),
    *(pytest.param(options, marks=pytest.mark.nightly) for options in NIGHTLY),
  ],
  ids=str,
)
def encoder(request):
  """(tokens, keep) -> encoded, of a model with random parameters."""
  name, options = request.param
  model = build(model_config(name, **TINY | options), 5)
  images = jax.ShapeDtypeStruct((2, 12, 16, 3), "float32")
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(0.1, 0.3, leaf.shape), "f"), shapes
  )

  def encode(tokens, keep=None):
    return model.apply({"params": params}, tokens, None, keep, method="encode")

  # A new function, so that it is traced again for what a test has replaced.
  return lambda *args: jax.jit(lambda *args: encode(*args)[0])(*args)


@pytest.fixture
def tokens():
  return np.random.default_rng(1).normal(size=SHAPE).astype("f")


def test_all_tokens_in_order_are_no_choice(encoder, tokens):
  keep = np.tile(np.arange(12), (2, 1))
  np.testing.assert_allclose(
    encoder(tokens, keep), encoder(tokens), rtol=1e-5, atol=1e-5
  )


def test_other_tokens_are_not_there(encoder, tokens, monkeypatch):
  """Compares with all tokens, of which no query looks at the others."""
  kept = encoder(tokens, KEEP)
  others = kept.shape[1] - KEEP.shape[1]  # class tokens and registers
  mask = np.full([2, others + 12], -np.inf, "f")
  mask[:, :others] = 0
  np.put_along_axis(mask, others + KEEP, 0, 1)
  softmax = jax.nn.softmax
  monkeypatch.setattr(
    jax.nn,
    "softmax",
    lambda scores, axis: softmax(scores + mask[:, None, None], axis),
  )
  every = encoder(tokens)
  expected = np.take_along_axis(every, (others + KEEP)[..., None], 1)
  expected = np.concatenate([every[:, :others], expected], 1)
  np.testing.assert_allclose(kept, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [QUICK[0], SLOW[2]], indirect=True)
def test_in_a_step_that_computes_few_images_at_once(
  encoder, tokens, monkeypatch
):
  expected = encoder(tokens, KEEP)
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=1))
  got = jax.jit(tiny.in_step(encoder))(tokens, KEEP)
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
