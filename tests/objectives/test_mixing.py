"""Mixup and cutmix: formulas, and the same rows on every mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import losses as losses_lib
from vit_jax import sharding
from vit_jax.batch import normalise
from vit_jax.config.checks import errors
from vit_jax.objectives import mixing

ONE = jax.devices()[:1]
KEYS = [jax.random.key(i) for i in range(200)]
# SGD: Adam divides by gradients that are nothing but rounding.
SGD = dict(optim__name="sgd", optim__lr=0.1)
BOTH = SGD | dict(objective__mixup=0.4, objective__cutmix=1.0)


@functools.cache
def mixed(alpha, box):
  """Mixes black rows of class 0 with white ones of class 1, for each key.

  The last row has no partner.
  """
  black = jnp.zeros((3, 12, 10, 3)), jnp.eye(2)[jnp.zeros(3, int)]
  white = jnp.ones((3, 12, 10, 3)), jnp.eye(2)[jnp.ones(3, int)]
  there = jnp.array([True, True, False])
  mix = jax.jit(lambda k: mixing.mix(*black, white, there, k, alpha, box))
  images, targets = jax.vmap(mix)(jnp.stack(KEYS))
  return np.asarray(images), np.asarray(targets)


def test_mixup_is_one_share_a_step_of_at_least_a_half():
  images, targets = (x[:, :2] for x in mixed(0.2, 0.0))
  share = images[:, :1, :1, :1, :1]  # of the white partner
  np.testing.assert_array_equal(images, np.broadcast_to(share, images.shape))
  share = share[:, 0, 0, 0, 0]
  # The share of the targets is a mean of 120 equal float32 near 1.
  want = share[:, None] * [[1, 1]]
  np.testing.assert_allclose(targets[:, :, 1], want, 0, 1e-6)
  np.testing.assert_allclose(targets.sum(-1), 1, atol=2e-7)
  assert share.min() >= 0 and 0.4 < share.max() <= 0.5
  # E[min(b, 1 - b)] of Beta(0.2, 0.2) is 0.1129 by numerical integration, the
  # deviation of a draw 0.157: four deviations of the mean of 200.
  assert abs(share.mean() - 0.1129) < 0.045


def test_cutmix_is_a_box_and_its_exact_share():
  images, targets = mixed(0.0, 1.0)
  sizes = set()
  for image, target in zip(images[:, 0], targets[:, 0], strict=True):
    inside = image[..., 0] == 1
    assert set(np.unique(image)) <= {0, 1}
    rows, columns = inside.any(1), inside.any(0)
    assert inside.sum() == rows.sum() * columns.sum()  # a filled rectangle
    np.testing.assert_allclose(target[1], inside.mean(), atol=1e-6)
    sizes.add((rows.sum(), columns.sum()))
  assert len(sizes) > 20
  # Before clipping, its area is 1 - b, and b of Beta(1, 1) has the mean 1/2; a
  # third is cut off. The bounds are wide for 200 draws with deviation 0.25.
  assert 0.22 < targets[:, 0, 1].mean() < 0.42


def test_with_both_half_of_the_steps_have_either():
  images, _ = mixed(0.4, 1.0)
  images = images[:, :2]
  is_cut = [set(np.unique(x)) <= {0, 1} for x in images]
  assert 70 < sum(is_cut) < 130  # mean 100, deviation 7


def test_a_row_without_partner_stays_as_it_is():
  for alpha, box in ((0.2, 0.0), (0.0, 1.0)):
    images, targets = mixed(alpha, box)
    assert not images[:, 2].any() and (targets[:, 2, 0] == 1).all()
    assert images[:, 0].any()


def test_partners_are_the_rows_before():
  batch = tiny.batch(0, tiny.config())
  partner = mixing.paired(batch)["partner"]
  for key in ("image", "label", "mask"):
    assert partner[key].dtype == batch[key].dtype
    np.testing.assert_array_equal(partner[key][1:], batch[key][:-1])
    np.testing.assert_array_equal(partner[key][0], batch[key][-1])


@pytest.mark.parametrize(
  "loss, is_binary",
  [
    ("softmax", False),
    pytest.param("sigmoid", False, marks=pytest.mark.slow),
    pytest.param("bce", False, marks=pytest.mark.slow),
    pytest.param("bce", True, marks=pytest.mark.slow),
  ],
)
def test_the_loss_is_that_of_the_mixed_rows(loss, is_binary):
  """Written out with big_vision's formula; the masked row is no partner."""
  config = tiny.config(
    **SGD,
    model__depth=1,
    objective__mixup=0.4,
    objective__loss=loss,
    objective__label_smoothing=0.0 if is_binary else 0.2,
    objective__binary_targets=is_binary,
  )
  parts = tiny.Parts(config, ONE)
  state, _ = parts.run(1)  # a head that is not zero
  batch = tiny.batch(1, config)
  root = jax.random.fold_in(jax.random.key(config.seed), 1)
  rng = jax.random.fold_in(jax.random.fold_in(root, 1), 2)
  a = float(jax.random.beta(jax.random.split(rng, 5)[1], 0.4, 0.4))
  a = np.full(16, max(a, 1 - a), np.float32)
  a[0] = 1.0  # its partner is the last row, which is masked
  images = normalise(batch["image"])
  images = (a * images.T + (1 - a) * np.roll(images, 1, 0).T).T
  targets = np.eye(10)[batch["label"]]
  if not is_binary:
    targets = 0.8 * targets + 0.02
  targets = (a * targets.T + (1 - a) * np.roll(targets, 1, 0).T).T
  if is_binary:  # both classes are whole, as in DeiT III
    targets = targets > 0
  logits, _ = jax.jit(parts.model.apply)(
    {"params": state.params}, jnp.asarray(images, jnp.float32)
  )
  want = losses_lib.LOSSES[loss](logits, jnp.asarray(targets, jnp.float32))
  _, (metrics,) = parts.run(1, state)
  # Sums of 15 terms in another order.
  np.testing.assert_allclose(metrics["loss"], want[:-1].mean(), rtol=2e-6)


@functools.cache
def on_one_device():
  return [m["loss"] for m in tiny.Parts(tiny.config(**BOTH), ONE).run(4)[1]]


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param(
      {"mesh__data": 2, "mesh__fsdp": 4, "optim__microbatch": 1},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
      marks=pytest.mark.nightly,
    ),
    pytest.param({"optim__microbatch": 1}, marks=pytest.mark.nightly),
  ],
  ids=str,
)
def test_is_the_same_on_every_mesh_and_in_microbatches(changes):
  parts = tiny.Parts(tiny.config(**BOTH, **changes))
  losses = [m["loss"] for m in parts.run(4)[1]]
  # Sums in another order.
  np.testing.assert_allclose(losses, on_one_device(), rtol=1e-5)


def test_between_devices_one_row_of_bytes_moves():
  config = tiny.config(mesh__data=4, mesh__fsdp=2)
  mesh = sharding.make_mesh(config.mesh)
  batch = sharding.to_global(tiny.batch(0, config), mesh)
  rows = jax.sharding.NamedSharding(mesh, sharding.BATCH_SPEC)
  paired = jax.jit(mixing.paired, out_shardings=rows).lower(batch).compile()
  moved = re.findall(
    r"= (\S+?)(?:{\S*)? (?:collective|all)-\w+\(", paired.as_text()
  )
  assert sorted(moved) == ["pred[1]", "s32[1]", "u8[1,16,16,3]"]


def test_nothing_is_added_to_a_batch_where_both_are_off():
  batch = tiny.batch(0, tiny.config())
  assert tiny.config().objective.paired(batch) is batch


def test_options_that_are_wrong():
  messages = errors(
    tiny.config(
      objective__mixup=-0.1,
      objective__cutmix=-1.0,
      objective__binary_targets=True,
    )
  )
  assert {f.split(":")[0] for f in messages} == {
    "config.objective.binary_targets",
    "config.objective.mixup",
    "config.objective.cutmix",
  }
