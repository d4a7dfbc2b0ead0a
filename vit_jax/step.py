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

from vit_jax import optim
from vit_jax.config import Config
from vit_jax.losses import LOSSES, smooth, targets_of
from vit_jax.sharding import BATCH_SPEC, infer, replicated


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

  The loss is the mean over the rows that the mask leaves. With
  config.optim.accum_steps above 1 the batch passes in microbatches, whose
  gradients are summed by a scan, so that only one microbatch's activations
  live at a time; the result is that of the whole batch up to rounding.

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
  accum = config.optim.accum_steps
  loss_fn = LOSSES[config.loss]
  root = jax.random.fold_in(jax.random.key(config.seed), 1)

  def summed_loss(params, batch, rng):
    """Sum over the rows, so that microbatches add up."""
    logits, _ = model.apply(
      {"params": params},
      normalise(batch["image"]),
      is_training=True,
      rngs={"dropout": rng},
    )
    targets = targets_of(batch["label"], num_classes)
    targets = smooth(targets, config.label_smoothing)
    return jnp.sum(loss_fn(logits, targets) * batch["mask"])

  def loss_and_grads(params, batch, rng):
    if accum == 1:
      return jax.value_and_grad(summed_loss)(params, batch, rng)

    def add_microbatch(total, i_and_micro):
      i, micro = i_and_micro
      part = jax.value_and_grad(summed_loss)(
        params, micro, jax.random.fold_in(rng, i)
      )
      return jax.tree.map(jnp.add, total, part), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    micros = jax.tree.map(lambda x: _microbatches(x, accum, mesh), batch)
    total, _ = jax.lax.scan(add_microbatch, zeros, (jnp.arange(accum), micros))
    return total

  def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    rng = jax.random.fold_in(root, state.step)
    rows = jnp.sum(batch["mask"], dtype=jnp.float32)
    total = loss_and_grads(state.params, batch, rng)
    loss, grads = jax.tree.map(lambda x: x / jnp.maximum(rows, 1.0), total)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
      ema = optim.ema(ema, params, config.optim.ema_decay)
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "param_norm": optax.tree.norm(params),
    }
    return TrainState(state.step + 1, params, opt_state, ema), metrics

  shardings = infer(state_shape, mesh)
  return jax.jit(
    train_step,
    in_shardings=(shardings, NamedSharding(mesh, BATCH_SPEC)),
    out_shardings=(shardings, replicated(mesh)),
    donate_argnums=0,
  )


def make_predict(model: nn.Module) -> Callable[[Any, UInt8[Array, "..."]], Any]:
  """Returns (params, uint8 images) -> (logits, out), not yet jitted.

  Whoever jits it takes what it needs of `out`; XLA drops the rest.
  """

  def predict(params, images):
    return model.apply({"params": params}, normalise(images))

  return predict


def _microbatches(x: jax.Array, accum: int, mesh: Mesh) -> jax.Array:
  """[b, ...] -> [accum, b / accum, ...] without moving rows between devices.

  Row r goes to microbatch r % accum, so each device keeps its own rows.
  """
  x = x.reshape(x.shape[0] // accum, accum, *x.shape[1:]).swapaxes(0, 1)
  return jax.lax.with_sharding_constraint(
    x, NamedSharding(mesh, P(None, *BATCH_SPEC))
  )
