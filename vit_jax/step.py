"""Train state and train step: what a config is assembled to.

Nothing here reads files, or knows where batches come from and what is learned
from them. The objective knows that.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from vit_jax import collectives, frozen, lora, optim, sharding
from vit_jax.batch import RunShape, normalise
from vit_jax.config import Config, LoRAConfig
from vit_jax.config.preprocessing import image_size
from vit_jax.devices import compiler_options
from vit_jax.models.variables import only_params

Params = Any  # a nested dict of arrays, as flax.linen makes it
# (gradients, updates, parameters before) -> scalars by name; pure.
StepMetrics = Callable[[Params, Params, Params], dict[str, jax.Array]]


@flax.struct.dataclass
class TrainState:
  """Everything that changes from step to step.

  step: int32 scalar, batches taken so far.
  params: Nested dict, float32. With config.lora, only the adapters and the
    head.
  opt_state: State of the optimizer, for `params`.
  ema: Running average of `params`; None if config.optim.ema_decay is None.
  base: With config.lora, the frozen parameters, which no checkpoint has;
    otherwise None.
  """

  step: Any
  params: Params
  opt_state: Any
  ema: Params = None
  base: Params = None

  @property
  def eval_params(self):
    """The model's parameters for evaluation: the average if there is one."""
    return lora.joined(self.base, self.params if self.ema is None else self.ema)

  @property
  def model_params(self):
    """The model's parameters in training."""
    return lora.joined(self.base, self.params)


def run_shape_of(
  config: Config, num_classes: int, num_examples: int | None
) -> RunShape:
  """Returns the sizes of a training run.

  Args:
    config: Its data.ops, num_classes, and total_steps or total_epochs are used.
    num_classes: Classes of the data; config.num_classes has precedence.
    num_examples: Records of an epoch. None leaves total_steps as the config has
      it.
  """
  steps = config.total_steps
  if steps is None and num_examples is not None:
    epochs = config.total_epochs * num_examples / config.data.batch_size
    steps = max(1, round(epochs))
  size = image_size(config.data.ops)
  return RunShape(config.num_classes or num_classes, size, steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """An assembled config: module, optimizer and step, without arrays.

  seed: Root of all randomness.
  module: The module to train; maps images in [-1, 1] to (logits, out).
  init: Makes a fresh state from a key; pure.
  state: The abstract state: `jax.ShapeDtypeStruct` with shardings.
  schedule: Updates applied so far -> learning rate; None without training.
  train_step: See `make_train_step`; None without training.
  lora: Options of the trained adapters.
  frozen_part: Everything before the first trained module, or None.
  """

  seed: int
  module: nn.Module
  init: Callable[[jax.Array], TrainState]
  state: TrainState
  schedule: optim.Schedule | None
  train_step: Callable[[TrainState, dict], tuple[TrainState, dict]] | None
  lora: LoRAConfig
  frozen_part: frozen.FrozenPart | None

  def init_state(self) -> TrainState:
    """Returns the state before the first step, made on its devices."""
    return self.maker(lambda state: state)()

  def init_params(self) -> Params:
    """Returns only the parameters of the fresh state."""
    return self.maker(lambda state: state.model_params)()

  def maker(self, part: Callable[[TrainState], Any]) -> Callable[[], Any]:
    """Returns the jitted function that makes a part of the fresh state."""

    def init():
      return part(self.init(jax.random.key(self.seed)))

    shardings = sharding.shardings_of(part(self.state))
    (device, *_) = self.state.step.sharding.device_set
    # It runs once, and LLVM's second level takes a third of its compile time
    # for the same bits.
    options = {"xla_backend_optimization_level": 1}
    return jax.jit(
      init,
      out_shardings=shardings,
      compiler_options=options if device.platform == "cpu" else None,
    )

  def compile_step(self, batch: dict) -> concurrent.futures.Future:
    """Starts to compile `train_step` in a thread.

    XLA releases Python's lock, so other work goes on.

    Args:
      batch: An abstract batch with shardings.

    Returns:
      A future. Once it has a result, `train_step` uses the compiled program.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1)
    done = pool.submit(
      lambda: self.train_step.lower(self.state, batch).compile()
    )
    pool.shutdown(wait=False)  # the thread ends with its work
    return done

  def predict(
    self,
    params: Params,
    images: UInt8[Array, "b h w c"] | Float[Array, "b ..."],
  ) -> tuple[Array, dict[str, Any]]:
    """Returns (logits, out); not jitted.

    The caller jits it and uses what it needs of `out`; XLA removes the rest.

    Args:
      params: Parameters of the model.
      images: Images; or activations of the frozen part, for which `out` is {}.
    """

    def forward(images):
      with frozen.entered(self.frozen_part, images) as x:
        logits, out = self.module.apply({"params": params}, normalise(x))
      return logits, out if x is images else {}

    devices = [*self.state.step.sharding.mesh.devices.flat]
    with lora.added(self.lora):
      if images.ndim != 4:  # activations
        return forward(images)
      return sharding.few_at_a_time(forward, images, devices)


def assemble(
  config: Config,
  run_shape: RunShape,
  mesh: Mesh,
  step_metrics: Sequence[StepMetrics] = (),
) -> Trainer:
  """Makes module, optimizer, abstract state and step of a run.

  Args:
    config: The run.
    run_shape: Sizes of the run.
    mesh: The run's mesh; its devices need not exist.
    step_metrics: Further metrics of the step, see `Callback.step_metrics`.

  Raises:
    ValueError: The config is not valid; `config.checks` finds all its errors
      beforehand.
  """
  module, loss_fn = config.objective.make(config.model, run_shape)
  tx, schedule, adapters = optax.identity(), None, LoRAConfig()
  if run_shape.total_steps is not None:
    adapters = config.lora
    tx, schedule = optim.make_optimizer(
      config.optim, run_shape.total_steps, config.model
    )

  def init(rng: jax.Array) -> TrainState:
    shape = (1, *run_shape.image_size, config.model.channels)
    images = jnp.zeros(shape, jnp.float32)
    params = optax.tree.cast(only_params(module.init(rng, images)), "float32")
    base = None
    if adapters.rank:
      key = jax.random.fold_in(rng, 1)
      params, base = lora.split(
        params, adapters, key, config.model, config.objective.own
      )
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=tx.init(optim.trained(params, config.optim.freeze)),
      ema=None if config.optim.ema_decay is None else params,
      base=base,
    )

  shapes = jax.eval_shape(lambda: init(jax.random.key(config.seed)))
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.infer(shapes, mesh, config.model),
  )
  train_step = part = None
  if run_shape.total_steps is not None:
    size = run_shape.image_size
    part = frozen.part_of(config, module, state.params, size)
    train_step = make_train_step(
      config, loss_fn, tx, state, mesh, step_metrics, part
    )
  return Trainer(
    config.seed,
    module,
    init,
    state,
    schedule and jax.jit(schedule),
    train_step,
    adapters,
    part,
  )


def make_train_step(
  config: Config,
  loss_fn: Callable[[Any, dict, jax.Array], tuple[Array, Array, dict]],
  tx: optax.GradientTransformation,
  state: TrainState,
  mesh: Mesh,
  step_metrics: Sequence[StepMetrics],
  part: frozen.FrozenPart | None,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
  """Returns the jitted (state, batch) -> (state, metrics); donates the state.

  The loss is a mean over the whole batch: the objective's sum divided by its
  count. Every device divides its rows into microbatches (see
  `sharding.fast_microbatch`) and adds up their sums and gradients. Only these
  are communicated, once a step (for blocks in a scan, along `fsdp` once a
  microbatch, see `collectives`). The result is that of the whole batch on one
  device, up to rounding.

  An update is applied only if loss and grad_norm are finite. Otherwise
  parameters, optimizer state and average do not change, and only `step` counts
  up.

  Args:
    config: The run.
    loss_fn: Loss of the objective, see `Objective.make`.
    tx: The optimizer.
    state: The abstract state, with shardings.
    mesh: The run's mesh.
    step_metrics: Further metrics of the step.
    part: The frozen part whose activations a batch may have in place of images.

  Returns:
    A function. Its metrics are float32 scalars: `loss`, the objective's own
    (also means), `grad_norm` (before clipping), `param_norm` (after the
    update), `skipped` (1 if the update was not applied, otherwise 0) and
    `undecodable` (rows with mask False).
  """
  shardings = sharding.shardings_of(state)
  specs = collectives.manual_specs(shardings.params)
  base_specs = collectives.manual_specs(shardings.base)
  trained = functools.partial(optim.trained, patterns=config.optim.freeze)
  most, fast = config.optim.microbatch, sharding.fast_microbatch(config, mesh)

  def summed(trained_params, params, batch, rng):
    """Sums over the rows, so that microbatches and devices add up."""
    params, base = params
    params = lora.joined(base, optim.replaced(params, trained_params))
    with lora.added(config.lora), frozen.entered(part, batch["image"]) as x:
      loss, count, named = loss_fn(params, {**batch, "image": x}, rng)
    return loss, (count, named)

  def sums_and_grads(params, batch, rng):
    """Returns sums and gradients of a device's rows, from its parameters."""
    whole = collectives.gather(params, (specs, base_specs), config.model)
    trained_whole = trained(whole[0], is_leaf=collectives.is_part)
    grad_fn = jax.value_and_grad(summed, has_aux=True)
    num_rows = len(jax.tree.leaves(batch)[0])
    number = sharding.num_microbatches(num_rows, most, fast)
    if number == 1:
      sums, grads = grad_fn(trained_whole, whole, batch, rng)
    else:

      def add(total, rows):
        part = grad_fn(trained_whole, whole, rows, rng)
        return jax.tree.map(
          lambda t, p: t + p.astype(t.dtype), total, part
        ), None

      microbatches = jax.tree.map(
        lambda x: x.reshape(number, num_rows // number, *x.shape[1:]), batch
      )
      one = jax.tree.map(lambda x: x[0], microbatches)
      sums = jax.eval_shape(summed, trained_whole, whole, one, rng)
      zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
      total = jax.tree.map(zeros, (sums, trained_whole))
      (sums, grads), _ = jax.lax.scan(add, total, microbatches)
      grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, trained_whole)
    sums = jax.tree.map(collectives.total, sums)
    return sums, collectives.reduce(grads, trained(specs))

  sums_and_grads = jax.shard_map(
    sums_and_grads,
    mesh=mesh,
    in_specs=((specs, base_specs), sharding.BATCH_SPEC, P()),
    out_specs=(P(), trained(specs)),
    axis_names=collectives.manual_axes(mesh),
    check_vma=False,
  )

  def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    root = jax.random.fold_in(jax.random.key(config.seed), 1)
    rng = jax.random.fold_in(root, state.step)
    rows = config.objective.paired(batch)
    (loss, (count, named)), grads = sums_and_grads(
      (state.params, state.base), rows, rng
    )
    loss, named, grads = jax.tree.map(
      lambda x: x / jnp.maximum(count, 1.0), (loss, named, grads)
    )
    grad_norm = optax.tree.norm(grads)
    # A finite norm means that every square is finite, and with the gradients
    # and their squares all that an optimizer keeps of them.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    before = trained(state.params)
    updates, opt_state = tx.update(grads, state.opt_state, before)
    after = optax.apply_updates(before, updates)
    params = optim.replaced(state.params, after)
    ema = state.ema
    if ema is not None:
      ema = optim.ema(ema, params, config.optim.ema_decay, state.step)
    params, opt_state, ema = jax.tree.map(
      lambda new, old: jnp.where(is_finite, new, old),
      (params, opt_state, ema),
      (state.params, state.opt_state, state.ema),
    )
    more = [fn(grads, updates, before) for fn in step_metrics]
    metrics = {
      "loss": loss,
      **named,
      "grad_norm": grad_norm,
      "param_norm": optax.tree.norm(params),
      **{key: value for part in more for key, value in part.items()},
      "skipped": 1.0 - is_finite,
      "undecodable": (~batch["mask"]).sum(dtype=jnp.float32),
    }
    return TrainState(
      state.step + 1, params, opt_state, ema, state.base
    ), metrics

  return jax.jit(
    train_step,
    in_shardings=(shardings, NamedSharding(mesh, sharding.BATCH_SPEC)),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
    compiler_options=compiler_options(
      mesh.devices.flat[0].device_kind,
      sharding.hidden_of_microbatch(config, mesh),
    ),
  )
