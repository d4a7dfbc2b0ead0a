"""Which losses use other rows, so that the mesh would change their value."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from vit_jax.objectives import row_check

KEY = jax.random.key(0)


def abstract(**arrays):
  return {
    k: jax.ShapeDtypeStruct((4, *shape), dtype)
    for k, (shape, dtype) in arrays.items()
  }


BATCH = abstract(
  x=((8,), jnp.float32),
  y=((8,), jnp.float32),
  views=((2, 8), jnp.float32),
  tokens=((6, 8), jnp.float32),
  label=((), jnp.int32),
  place=((1,), jnp.int32),
  mask=((), bool),
)
BATCH["shared"] = {"keys": jax.ShapeDtypeStruct((4, 8), "float32")}
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def found(fn):
  """How a loss uses other rows; fn returns the loss's sum, or all results."""

  def loss(w, batch):
    result = fn(w, batch)
    if isinstance(result, tuple):
      return (*result, {})[:3]
    return result, jnp.sum(batch["mask"], dtype=jnp.float32), {}

  return row_check.mixed_rows(loss, W, BATCH)


def info_nce(w, b):
  logits = (b["x"] @ w) @ b["y"].T
  labels = jnp.arange(len(logits))
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def variance(w, b):
  """As in VICReg."""
  z = b["x"] @ w
  std = jnp.sqrt(z.var(0) + 1e-4)
  return jnp.maximum(0, 1 - std).sum()


def batch_norm(w, b):
  norm = nn.BatchNorm(use_running_average=False)
  variables = {"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}
  y, _ = norm.apply(variables, b["x"] @ w, mutable=["batch_stats"])
  return y.sum()


def own_count(w, b):
  return jnp.sum(b["x"] * b["mask"][:, None]) / b["mask"].sum()


MIXED = {
  "info_nce": info_nce,
  "variance": variance,
  "batch_norm": batch_norm,
  "own_count": own_count,
  "scaled": lambda w, b: jnp.sum(b["x"] * b["y"].sum()),
  "roll": lambda w, b: jnp.sum(b["x"] * jnp.roll(b["y"], 1, 0)),
  "cumsum": lambda w, b: jnp.sum(jnp.cumsum(b["x"], 0) * b["y"]),
  "max": lambda w, b: b["x"].max(),
  "correlation": lambda w, b: (jnp.square(b["x"].T @ b["y"]).sum(), 1.0),
  "regulariser": lambda w, b: b["x"].sum() + jnp.square(w).sum(),
  "remat": lambda w, b: jax.checkpoint(jax.nn.relu)(b["x"].sum()),
  "scan": lambda w, b: jax.lax.scan(
    lambda c, x: (c + x.sum() ** 2, None), 0.0, b["x"]
  )[0],
  "while": lambda w, b: jax.lax.while_loop(
    lambda c: c[0] < w[0, 0], lambda c: (c[0] + 1, c[1] ** 2), (0, b["x"].sum())
  )[1],
  "branch": lambda w, b: jax.lax.cond(
    b["x"].sum() > 0, lambda: b["y"].sum(), lambda: 0.0
  ),
  "one_count": lambda w, b: (b["x"].sum(), 1.0),
  "rows": lambda w, b: (b["x"].sum(1), 1.0 * b["mask"]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name):
  assert found(MIXED[name]) is not None


def all_tokens(w, b):
  """As in MAE: a sum and a count of some tokens, in blocks under remat."""

  def block(x, w):
    scores = jnp.einsum("bid,bjd->bij", x @ w, x)
    return x + jax.nn.softmax(scores) @ x, None

  keys = jax.vmap(lambda r: jax.random.fold_in(KEY, r))(b["label"])
  order = jax.vmap(lambda k: jax.random.permutation(k, 6))(keys)
  kept = jnp.take_along_axis(b["tokens"], order[:, :3, None], 1)
  kept, _ = jax.lax.scan(jax.checkpoint(block), kept, jnp.stack([w, w]))
  mask = jnp.zeros((len(kept), 6)).at[jnp.arange(len(kept))[:, None], order]
  mask = mask.set(1.0) * b["mask"][:, None]
  loss = jnp.sum(kept.mean((1, 2)) * b["mask"]) + jnp.sum(mask)
  return loss, mask.sum(), {"kept": (jnp.sum(kept), 6.0 * len(kept))}


def two_views(w, b):
  """Both views pass the model together, as rows of one batch."""
  x = jnp.concatenate([b["views"][:, 0], b["views"][:, 1]]) @ w
  first, second = jnp.split(x, 2)
  merged = b["views"].reshape(-1, 8) @ w
  again = merged.reshape(b["views"].shape)
  return optax.cosine_distance(first, second).sum() + again.sum()


def dead(w, b):
  means = b["x"].mean(0)
  jnp.sqrt(means.sum())
  unused = jax.lax.fori_loop(
    0, 3, lambda i, c: (c[0] * 2, jnp.sqrt(c[1])), (b["x"].sum(), means)
  )
  return unused[0]


def per_class(w, b):
  sums = jax.ops.segment_sum(b["x"][:, 0], b["label"], 5)
  return sums @ jnp.arange(5.0)


def against_a_teacher(w, b):
  """InfoNCE with a teacher's vectors of all rows, as a learner's targets."""
  log_p = jax.nn.log_softmax(b["x"] @ w @ b["shared"]["keys"].T / 0.2)
  own = jnp.take_along_axis(log_p, b["place"], 1)[:, 0]
  right = jnp.sum((log_p.argmax(1) == b["place"][:, 0]) * b["mask"])
  count = b["mask"].sum(dtype=jnp.float32)
  return 0.0 - jnp.sum(own * b["mask"]), count, {"accuracy": (right, count)}


APART = {
  "all_tokens": all_tokens,
  "two_views": two_views,
  "dead": dead,
  "per_class": per_class,
  "against_a_teacher": against_a_teacher,
  "loops": lambda w, b: (
    jax.lax.scan(
      lambda c, x: (c + x.sum(), None), 0.0, b["views"].swapaxes(0, 1)
    )[0]
    + jax.vmap(
      lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)
    )(b["x"]).sum()
  ),
  "branch": lambda w, b: jax.lax.cond(
    w.sum() > 0, lambda: b["y"].sum(), lambda: 0.0
  ),
  "number_of_rows": lambda w, b: (b["x"].sum(), jnp.float32(len(b["x"]))),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name):
  assert found(APART[name]) is None


def test_message_names_operation_and_line():
  line = own_count.__code__.co_firstlineno + 1
  message = found(own_count)
  assert f"`div`, test_row_check.py line {line}" in message
  # Not the line inside the library, nor the first caller of a cached function.
  for _ in range(2):
    line = variance.__code__.co_firstlineno + 3
    assert f"test_row_check.py line {line}" in found(variance)
