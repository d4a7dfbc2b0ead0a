"""State, loss and update: the one jitted function that trains.

Nothing here reads files or knows where batches come from.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from vit_jax import collectives, optim
from vit_jax.config import Config
from vit_jax.devices import compiler_options
from vit_jax.losses import LOSSES, smooth, targets_of
from vit_jax.sharding import BATCH_SPEC, infer, num_microbatches, replicated


@flax.struct.dataclass
class TrainState:
  """All that changes from step to step.

  step: int32 scalar, updates applied so far.
  params: Nested dict, float32.
  opt_state: What optax keeps.
  ema: Averaged parameters, or None where config.optim.ema_decay is.
  """

  step: Any
  params: Any
  opt_state: Any
  ema: Any = None

  @property
  def eval_params(self):
    """The averaged parameters where there are some."""
    return self.params if self.ema is None else self.ema


def normalise(images: UInt8[Array, "b h w c"]) -> Float[Array, "b h w c"]:
  """Maps 0..255 to -1..1, as the published checkpoints expect."""
  return images.astype(jnp.float32) / 127.5 - 1.0


def make_init(
  config: Config,
  model: nn.Module,
  tx: optax.GradientTransformation,
  image_size: tuple[int, int],
) -> Callable[[jax.Array], TrainState]:
  """Returns rng -> fresh state; pure, so its shapes come from `eval_shape`."""

  def init(rng: jax.Array) -> TrainState:
    images = jnp.zeros((1, *image_size, 3), jnp.float32)
    params = model.init(rng, images)["params"]
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=tx.init(params),
      ema=None if config.optim.ema_decay is None else params,
    )

  return init


def make_state(
  init: Callable[[jax.Array], TrainState], mesh: Mesh, seed: int
) -> TrainState:
  """Returns the fresh state, every array born where it belongs."""
  rng = jax.random.key(seed)
  shardings = infer(jax.eval_shape(init, rng), mesh)
  return jax.jit(init, out_shardings=shardings)(rng)


def make_params(
  init: Callable[[jax.Array], TrainState], mesh: Mesh, seed: int
) -> Any:
  """Returns the parameters of the fresh state alone."""
  params = lambda rng: init(rng).params
  rng = jax.random.key(seed)
  shardings = infer(jax.eval_shape(params, rng), mesh)
  return jax.jit(params, out_shardings=shardings)(rng)


def make_train_step(
  config: Config,
  model: nn.Module,
  tx: optax.GradientTransformation,
  num_classes: int,
  state_shape: TrainState,
  mesh: Mesh,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
  """Returns the jitted (state, batch) -> (state, metrics); donates the state.

  The loss is the mean over the rows that the mask leaves. Every device cuts
  its own rows into microbatches of at most config.optim.microbatch, and sums
  their gradients; only these sums cross the links, once a step. The result is
  that of the whole batch on one device, up to rounding.

  Args:
    config: The run.
    model: Its `apply` gives (logits, out).
    tx: The optimizer.
    num_classes: Width of the head.
    state_shape: `eval_shape` of the state.
    mesh: Where it runs.

  Returns:
    A function; metrics are the float32 scalars `loss`, `grad_norm` (before
    clipping) and `param_norm` (after the update).
  """
  loss_fn = LOSSES[config.objective.loss]
  root = jax.random.fold_in(jax.random.key(config.seed), 1)
  shardings = infer(state_shape, mesh)
  specs = collectives.manual_specs(shardings.params)

  def summed_loss(params, batch, rng):
    """Sum over the rows, so that microbatches and devices add up."""
    logits, _ = model.apply(
      {"params": params},
      normalise(batch["image"]),
      is_training=True,
      records=batch["index"],
      rngs={"dropout": rng},
    )
    targets = targets_of(batch["label"], num_classes)
    targets = smooth(targets, config.objective.label_smoothing)
    return jnp.sum(loss_fn(logits, targets) * batch["mask"])

  def loss_and_grads(params, batch, rng):
    """Of one device's rows, given its part of the parameters."""
    whole = collectives.gather(params, specs, config.model.dtype)
    grad_fn = jax.value_and_grad(summed_loss)
    num_rows = batch["mask"].shape[0]
    number = num_microbatches(num_rows, config.optim.microbatch)
    if number == 1:
      loss, grads = grad_fn(whole, batch, rng)
    else:

      def add(total, microbatch):
        part = grad_fn(whole, microbatch, rng)
        return jax.tree.map(
          lambda t, p: t + p.astype(t.dtype), total, part
        ), None

      zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
      total = (jnp.zeros(()), jax.tree.map(zeros, whole))
      microbatches = jax.tree.map(
        lambda x: x.reshape(number, num_rows // number, *x.shape[1:]), batch
      )
      (loss, grads), _ = jax.lax.scan(add, total, microbatches)
      grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, whole)
    return collectives.total(loss), collectives.reduce(grads, specs)

  loss_and_grads = jax.shard_map(
    loss_and_grads,
    mesh=mesh,
    in_specs=(specs, BATCH_SPEC, P()),
    out_specs=(P(), specs),
    axis_names=collectives.manual_axes(mesh),
    check_vma=False,
  )

  def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    rng = jax.random.fold_in(root, state.step)
    rows = jnp.sum(batch["mask"], dtype=jnp.float32)
    total = loss_and_grads(state.params, batch, rng)
    loss, grads = jax.tree.map(lambda x: x / jnp.maximum(rows, 1.0), total)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
      ema = optim.ema(ema, params, config.optim.ema_decay, state.step)
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "param_norm": optax.tree.norm(params),
    }
    return TrainState(state.step + 1, params, opt_state, ema), metrics

  return jax.jit(
    train_step,
    in_shardings=(shardings, NamedSharding(mesh, BATCH_SPEC)),
    out_shardings=(shardings, replicated(mesh)),
    donate_argnums=0,
    compiler_options=compiler_options(mesh.devices.flat[0].device_kind),
  )


def make_predict(model: nn.Module) -> Callable[[Any, UInt8[Array, "..."]], Any]:
  """Returns (params, uint8 images) -> (logits, out), not yet jitted.

  Whoever jits it takes what it needs of `out`; XLA drops the rest.
  """

  def predict(params, images):
    return model.apply({"params": params}, normalise(images))

  return predict
