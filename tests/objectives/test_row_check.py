"""Which losses use other rows, so that the mesh would change their value."""

import dataclasses
import doctest

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from vit_jax import lora, step
from vit_jax.batch import LabelStatistics, Standardisation
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
  mask=((), bool),
)
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
  z = b["x"] @ w
  std = jnp.sqrt(z.var(0) + 1e-4)
  return jnp.maximum(0, 1 - std).sum()


def barlow(w, b):
  return jnp.square((b["x"] @ w).T @ b["y"]).sum()


def batch_norm(w, b):
  norm = nn.BatchNorm(use_running_average=False)
  variables = {"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}
  y, _ = norm.apply(variables, b["x"] @ w, mutable=["batch_stats"])
  return y.sum()


def ghost(w, b):
  groups = b["x"].reshape(-1, 2, 4 * len(b["x"]))
  return groups.sum()


def own_count(w, b):
  return jnp.sum(b["x"] * b["mask"][:, None]) / b["mask"].sum()


MIXED = {
  "info_nce": info_nce,
  "variance": variance,
  "barlow": barlow,
  "batch_norm": batch_norm,
  "own_count": own_count,
  "mean": lambda w, b: jnp.mean(b["x"] @ w),
  "mean_of_rows": lambda w, b: jnp.sum(b["x"] / len(b["x"])),
  "roll": lambda w, b: jnp.sum(b["x"] * jnp.roll(b["y"], 1, 0)),
  "flip": lambda w, b: jnp.sum(b["x"] * b["y"][::-1]),
  "max": lambda w, b: b["x"].max(),
  "max_of_sum": lambda w, b: jnp.maximum(b["x"].sum(), 0),
  "log": lambda w, b: jnp.log(b["x"].sum()),
  "product": lambda w, b: b["x"].sum() * b["y"].sum(),
  "square": lambda w, b: b["x"].sum() ** 2,
  "where": lambda w, b: jnp.where(b["x"].sum() > 0, b["y"].sum(), 0),
  "centred": lambda w, b: jnp.abs(b["x"] - b["x"].mean(0)[None]).sum(),
  "sort": lambda w, b: jnp.sum(jnp.sort(b["x"], 0) * b["y"]),
  "cumsum": lambda w, b: jnp.sum(jnp.cumsum(b["x"], 0) * b["y"]),
  "top_k": lambda w, b: jax.lax.top_k(b["x"][:, 0], 3)[0].sum(),
  "first": lambda w, b: b["x"][0].sum(),
  "half": lambda w, b: b["x"][: len(b["x"]) // 2].sum(),
  "permuted": lambda w, b: jnp.sum(
    b["x"] * b["y"][jax.random.permutation(KEY, len(b["y"]))]
  ),
  "next_row": lambda w, b: jnp.sum(
    b["x"] * b["y"][(jnp.arange(len(b["y"])) + 1) % len(b["y"])]
  ),
  "by_label": lambda w, b: b["x"][b["label"]].sum(),
  "position": lambda w, b: jnp.sum(b["x"][:, 0] * jnp.arange(len(b["x"]))),
  "draw": lambda w, b: jnp.sum(b["x"] * jax.random.normal(KEY, b["x"].shape)),
  "keys": lambda w, b: jnp.sum(
    jax.vmap(lambda k, x: x * jax.random.normal(k))(
      jax.random.split(KEY, len(b["x"])), b["x"]
    )
  ),
  "fold_in": lambda w, b: jnp.sum(
    jax.vmap(lambda i, x: x * jax.random.normal(jax.random.fold_in(KEY, i)))(
      jnp.arange(len(b["x"])), b["x"]
    )
  ),
  "dropout": lambda w, b: (
    nn.Dropout(0.5, deterministic=False)
    .apply({}, b["x"], rngs={"dropout": KEY})
    .sum()
  ),
  "regulariser": lambda w, b: b["x"].sum() + jnp.square(w).sum(),
  "groups": lambda w, b: b["x"].T.reshape(-1, 8).max(-1).sum(),
  "scan": lambda w, b: jax.lax.scan(
    lambda c, x: (c * 0.9 + x, None), jnp.zeros(8), b["x"]
  )[0].sum(),
  "carry": lambda w, b: jax.lax.fori_loop(
    0, 3, lambda i, c: c * c, b["x"].sum()
  ),
  "branch": lambda w, b: jax.lax.cond(
    b["x"].sum() > 0, lambda: b["y"].sum(), lambda: 0.0
  ),
  "until_all": lambda w, b: jax.lax.while_loop(
    lambda x: (x.sum(1) < 9).any(), lambda x: x + 1, b["x"]
  ).sum(),
  "spread": lambda w, b: jnp.broadcast_to(b["x"].sum(), b["x"].shape).sum(),
  "repeated": lambda w, b: jnp.broadcast_to(
    b["x"][:, :1], (len(b["x"]), len(b["x"]))
  ).sum(),
  "dynamic_slice": lambda w, b: jax.lax.dynamic_index_in_dim(b["x"], 0).sum(),
  "one_count": lambda w, b: (b["x"].sum(), 1.0),
  "count_without_sum": lambda w, b: (1.0, b["x"].sum()),
  "rows": lambda w, b: b["x"].sum(1),
  "named": lambda w, b: (
    *(b["x"].sum(), 1.0 * len(b["x"])),
    {"w": (w.sum(), 1.0 * len(b["x"]))},
  ),
  "named_max": lambda w, b: (
    *(b["x"].sum(), 1.0 * len(b["x"])),
    {"max": (b["x"].max(), 1.0)},
  ),
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


def distilled(w, b):
  teacher = jax.lax.stop_gradient(jax.nn.softmax(b["y"]))
  return optax.softmax_cross_entropy(b["x"] @ w, teacher) @ b["mask"]


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


def gradient_penalty(w, b):
  slopes = jax.grad(lambda x: jnp.tanh(x @ w).sum())(b["x"])
  return jnp.square(slopes).sum()


APART = {
  "all_tokens": all_tokens,
  "two_views": two_views,
  "distilled": distilled,
  "dead": dead,
  "per_class": per_class,
  "gradient_penalty": gradient_penalty,
  "linear": lambda w, b: 0.5 * (b["x"].sum(0) - b["y"].sum(0)) @ w[0] / 3,
  "picked": lambda w, b: b["x"][jnp.arange(len(b["x"])), b["label"]].sum(),
  "sum_in_scan": lambda w, b: jax.lax.scan(
    lambda c, x: (c + x.sum(), None), 0.0, b["views"].swapaxes(0, 1)
  )[0],
  "vmapped_while": lambda w, b: jax.vmap(
    lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)
  )(b["x"]).sum(),
  "sort_in_row": lambda w, b: jnp.sum(jnp.sort(b["x"])[:, ::-1] * b["y"]),
  "number_of_rows": lambda w, b: (b["x"].sum(), jnp.float32(len(b["x"]))),
  "branch": lambda w, b: jax.lax.cond(
    w.sum() > 0, lambda: b["y"].sum(), lambda: 0.0
  ),
  "constant_metric": lambda w, b: (
    *(b["x"].sum(), b["mask"].sum(dtype=jnp.float32)),
    {"scale": (w[0, 0], 1.0)},
  ),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name):
  assert found(APART[name]) is None


def test_docstring():
  assert doctest.testmod(row_check).failed == 0


def test_shared_arrays_have_no_rows():
  batch = BATCH | {"shared": {"centre": jax.ShapeDtypeStruct((8,), "float32")}}

  def loss(w, b):
    centred = b["x"] - b["shared"]["centre"][None] / 2.0
    return jnp.square(centred).sum(), b["mask"].sum(dtype=jnp.float32), {}

  assert row_check.mixed_rows(loss, W, batch) is None


def test_a_loop_over_rows_is_named():
  assert "loops over the rows" in found(MIXED["scan"])


def test_message_names_operation_and_line():
  line = own_count.__code__.co_firstlineno + 1
  message = found(own_count)
  assert f"`div`, test_row_check.py line {line}" in message
  # Not the line inside the library, nor the first caller of a cached function.
  for _ in range(2):
    line = variance.__code__.co_firstlineno + 2
    assert f"test_row_check.py line {line}" in found(variance)


def objective_fault(run_shape=None, rows=None, **changes):
  """What is found in the loss of a tiny run, as its step computes it."""
  config = tiny.config(**changes)
  run_shape = run_shape or step.RunShape(tiny.NUM_CLASSES, (16, 16), 20)
  learner = config.objective.make(config.model, run_shape, {})

  def init():
    params = learner.module.init(KEY, jnp.zeros((1, 16, 16, 3)))["params"]
    if config.lora.rank:
      return lora.split(params, config.lora, KEY, config.model, config.objective.own)
    return params, None

  def loss(params, batch, rng, step):
    with lora.added(config.lora):
      return learner.loss(lora.joined(*reversed(params)), batch, rng, step)

  batch = jax.eval_shape(config.objective.paired, tiny.batch(0, config))
  batch |= rows or {}
  return row_check.mixed_rows(loss, jax.eval_shape(init), batch, KEY, 0)


@pytest.mark.parametrize(
  "changes",
  [
    dict(objective__mixup=0.8, objective__cutmix=1.0, model__dropout=0.1),
    dict(objective__label_smoothing=0.1, model__stochastic_depth=0.2),
    dict(objective__loss="sigmoid", model__scan=True, model__dropout=0.1),
    dict(
      objective__loss="bce",
      objective__binary_targets=True,
      objective__mixup=0.2,
      model__remat="full",
    ),
    dict(model__dtype="bfloat16", lora__rank=2),
    dict(model__name="modern", model__variant="Ti/8", model__scan=True),
    dict(model__pool="map", model__posemb="sincos2d"),
    tiny.HYBRID,
    tiny.RESNET,
    *(
      dict(objective__kind="masked_patch", objective__target=target)
      for target in ("mean_color", "small", "pixels")
    ),
  ],
  ids=str,
)
def test_own_objectives(changes):
  assert objective_fault(**changes) is None


def test_own_objectives_with_data():
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 20)
  statistics = LabelStatistics(class_counts=tuple(range(1, 11)))
  counts = dataclasses.replace(shape, labels=lambda: statistics)
  weighted = objective_fault(counts, objective__class_weights="balanced")
  moments = LabelStatistics(standardisation=Standardisation((1.0,), (2.0,)))
  numbers = dataclasses.replace(shape, num_classes=1, labels=lambda: moments)
  regression = objective_fault(numbers, objective__kind="regression")
  several = {"label": np.zeros((16, tiny.NUM_CLASSES), np.float32)}
  multilabel = objective_fault(rows=several, objective__loss="sigmoid")
  assert (weighted, regression, multilabel) == (None, None, None)
