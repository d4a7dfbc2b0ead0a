"""Train state and train step: what a config is assembled to.

Nothing here reads files, or knows where batches come from and what is learned
from them. The objective knows that.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from vit_jax import collectives, microbatch, optim, sharding
from vit_jax.batch import RunShape, normalise
from vit_jax.config import Config, ConfigError
from vit_jax.data.preprocessing import image_size
from vit_jax.devices import compiler_options
from vit_jax.models.stacking import unstack_blocks
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Learner
from vit_jax.param_groups import path_of
from vit_jax.trainable import (
  TEACHER,
  Params,
  Trainable,
  joined,
  saved_params,
)

# The names of a step's own metrics.
METRICS = ("loss", "grad_norm", "param_norm", "skipped", "undecodable")
EMA = "ema"  # in `TrainState.averages`: the parameters for evaluation
OBJECTIVE = "objective"  # in `TrainState.memory`: the arrays of the objective


@runtime_checkable
class StepObserver(Protocol):
  """The part of a `Callback` that the step calls; see there."""

  name: str

  def init_memory(self, params: Params) -> Any: ...

  def step_metrics(
    self,
    step: jax.Array,
    grads: Params,
    updates: Params,
    params: Params,
    memory: Any,
  ) -> tuple[dict[str, jax.Array], Any]: ...


@flax.struct.dataclass
class TrainState:
  """Everything that a step reads and changes.

  step: int32 scalar, batches taken so far.
  params: What is trained: a nested dict, float32, see `vit_jax.trainable`.
  opt_state: State of the optimizer, for `params`.
  fixed: Parameters that do not change, by their kind: "frozen" layers, the
    "base" of adapters, a frozen "teacher".
  averages: Running means of `params`: "ema" for evaluation, which may be that
    of a teacher, and a "teacher" that is not evaluated.
  memory: Arrays that each step reads and changes, by their owner: "objective",
    or the name of a callback.
  """

  step: Any
  params: Params
  opt_state: Any
  fixed: dict[str, Params] = flax.struct.field(default_factory=dict)
  averages: dict[str, Params] = flax.struct.field(default_factory=dict)
  memory: dict[str, Any] = flax.struct.field(default_factory=dict)

  @property
  def eval_params(self):
    """The model's parameters for evaluation: the average if there is one."""
    return joined(self.averages.get(EMA, self.params), self.fixed)

  @property
  def model_params(self):
    """The model's parameters in training."""
    return joined(self.params, self.fixed)

  def with_params(self, params: Params) -> "TrainState":
    """Returns a fresh state with other parameters, such as config.init's.

    Args:
      params: Nested dict like `model_params`. Parameters that are None or
        missing keep their initial values, such as the head for other classes.
    """
    new = flatten_dict(params, sep="/")

    def replace(path, fresh):
      value = new.get(path_of(path))
      return fresh if value is None else jax.device_put(value, fresh.sharding)

    def replaced(tree):
      return jax.tree_util.tree_map_with_path(replace, tree)

    params = replaced(self.params)
    return self.replace(
      params=params,
      fixed={
        k: v if k == TEACHER else replaced(v) for k, v in self.fixed.items()
      },
      averages={k: jax.tree.map(jnp.copy, params) for k in self.averages},
    )

  def with_fixed(
    self, kind: str, params: Params, like: "TrainState"
  ) -> "TrainState":
    """Returns a state with fixed parameters that no checkpoint has.

    Args:
      kind: Key of `fixed`.
      params: Nested dict of arrays, with the fixed ones.
      like: The abstract state, with shardings.

    Raises:
      KeyError: `params` lacks an array.
    """
    new = flatten_dict(params, sep="/")
    tree = jax.tree_util.tree_map_with_path(
      # Copies, because a step donates its state.
      lambda path, x: jax.device_put(np.array(new[path_of(path)]), x.sharding),
      like.fixed[kind],
    )
    return self.replace(fixed={**self.fixed, kind: tree})


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
  init: Makes a fresh state from a key; pure. Parameters that are read from
    files (`fixed` "teacher") are zeros.
  state: The abstract state: `jax.ShapeDtypeStruct` with shardings.
  schedule: Updates applied so far -> learning rate; None without training.
  train_step: See `make_train_step`; None without training.
  trainable: Which parameters are trained.
  observers: Callbacks that are a part of the step.
  """

  seed: int
  module: nn.Module
  init: Callable[[jax.Array], TrainState]
  state: TrainState
  schedule: optim.Schedule | None
  train_step: Callable[[TrainState, dict], tuple[TrainState, dict]] | None
  trainable: Trainable
  observers: Sequence[StepObserver] = ()

  def init_state(self) -> TrainState:
    """Returns the state before the first step, made on its devices."""
    return self.maker(lambda state: state)()

  def completed(self, state: TrainState) -> TrainState:
    """Returns a restored state, with the first memory of new callbacks."""
    new = self.state.memory.keys() - state.memory.keys()
    if not new:
      return state
    make = self.maker(lambda state: {k: state.memory[k] for k in new})
    return state.replace(memory={**state.memory, **make()})

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
      with self.trainable.applied({"image": images}) as batch:
        x = batch["image"]
        logits, out = self.module.apply({"params": params}, normalise(x))
      return logits, out if x is images else {}

    devices = [*self.state.step.sharding.mesh.devices.flat]
    if images.ndim != 4:  # activations
      return forward(images)
    return microbatch.few_at_a_time(forward, images, devices)


def assemble(
  config: Config,
  run_shape: RunShape,
  mesh: Mesh,
  observers: Sequence[StepObserver] = (),
  learner: Learner | None = None,
) -> Trainer:
  """Makes module, optimizer, abstract state and step of a run.

  Args:
    config: The run.
    run_shape: Sizes of the run.
    mesh: The run's mesh; its devices need not exist.
    observers: Callbacks, which add metrics and memory to the step.
    learner: What the objective has made; None to make it now, for an objective
      without models of its own.

  Raises:
    ValueError: The config is not valid; `config.checks` finds all its errors
      beforehand.
  """
  if learner is None:
    learner = config.objective.make(config.model, run_shape, {})
  module, is_training = learner.module, run_shape.total_steps is not None
  tx, schedule = optax.identity(), None
  if is_training:
    tx, schedule = optim.make_optimizer(
      config.optim, run_shape.total_steps, config.model
    )

  def model_params(rng: jax.Array) -> Params:
    shape = (1, *run_shape.image_size, config.model.channels)
    images = jnp.zeros(shape, jnp.float32)
    params = only_params(module.init(rng, images))
    if learner.init is not None:
      params = learner.init(params, jax.random.fold_in(rng, 2))
    return optax.tree.cast(params, "float32")

  key = jax.eval_shape(lambda: jax.random.key(config.seed))
  trainable = Trainable(config)

  def init(rng: jax.Array) -> TrainState:
    params, fixed, averages, memory = model_params(rng), {}, {}, {}
    if is_training:
      params, fixed = trainable.split(params, jax.random.fold_in(rng, 1))
      if learner.frozen is not None:
        fixed[TEACHER] = jax.tree.map(
          lambda x: jnp.zeros(x.shape, x.dtype), learner.frozen.model.params
        )
      if learner.average is not None:
        averages[_average_of(learner)] = params
      if learner.memory:
        memory[OBJECTIVE] = jax.tree.map(jnp.asarray, learner.memory)
      for observer in observers:
        first = observer.init_memory(unstack_blocks(params, config.model))
        if jax.tree.leaves(first):
          memory[_memory_key(observer)] = first
    if config.optim.ema_decay is not None:
      averages[EMA] = params
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=tx.init(params),
      fixed=fixed,
      averages=averages,
      memory=memory,
    )

  shapes = jax.eval_shape(init, key)
  own = config.objective.SHARDING
  shardings = sharding.infer(shapes, mesh, config.model, own)
  if TEACHER in shapes.fixed:
    shardings.fixed[TEACHER] = sharding.infer(
      shapes.fixed[TEACHER], mesh, learner.frozen.model.config
    )
  if OBJECTIVE in shapes.memory:  # each device reads and changes all of it
    shardings.memory[OBJECTIVE] = jax.tree.map(
      lambda _: sharding.replicated(mesh), shapes.memory[OBJECTIVE]
    )
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
  for observer in observers:  # before anything is compiled
    trained = jax.eval_shape(
      lambda x: unstack_blocks(x, config.model), state.params
    )
    jax.eval_shape(
      functools.partial(_observed, observer, METRICS),
      *(state.step, trained, trained, trained, state.memory.get(observer.name)),
    )
  train_step = None
  if is_training:
    size = run_shape.image_size
    trainable = Trainable.of(config, module, state.model_params, size)
    train_step = make_train_step(
      config, learner, tx, state, mesh, observers, trainable
    )
  return Trainer(
    config.seed,
    module,
    init,
    state,
    schedule and jax.jit(schedule),
    train_step,
    trainable,
    observers,
  )


def _observed(
  observer: StepObserver, taken: Collection[str], *args: Any
) -> tuple[dict[str, jax.Array], Any]:
  """Returns the metrics and the memory of `observer.step_metrics(*args)`.

  Raises:
    ConfigError: They have another form, or a name is taken.
  """
  where = f"config.callbacks: got {type(observer).__name__}, whose step_metrics"
  result = observer.step_metrics(*args)
  if not (isinstance(result, tuple) and len(result) == 2):
    raise ConfigError([f"{where} must return (metrics, memory)."])
  for name, value in result[0].items():
    if name in taken:
      raise ConfigError([f"{where} returns {name!r}, which the step has."])
    if jnp.ndim(value):
      shape = jnp.shape(value)
      raise ConfigError([f"{where} returns {name!r} of {shape}, no scalar."])
  return result


def _memory_key(observer: StepObserver) -> str:
  if observer.name and observer.name != OBJECTIVE:
    return observer.name
  raise ConfigError(
    [
      f"config.callbacks: got {type(observer).__name__}, which has memory, with"
      f" the name {observer.name!r}, expected another name as its key."
    ]
  )


def make_train_step(
  config: Config,
  learner: Learner,
  tx: optax.GradientTransformation,
  state: TrainState,
  mesh: Mesh,
  observers: Sequence[StepObserver],
  trainable: Trainable,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
  """Returns the jitted (state, batch) -> (state, metrics); donates the state.

  The loss is a mean over the whole batch: the objective's sum divided by its
  count. Every device computes the objective's targets of all its rows, without
  a gradient. Then it divides its rows into microbatches (see
  `microbatch.fast_microbatch`) and adds up their sums and gradients. Only these
  are communicated, once a step (for blocks in a scan, along `fsdp` once a
  microbatch, see `collectives`). The result is that of the whole batch on one
  device, up to rounding.

  An update is applied only if loss and grad_norm are finite. Otherwise
  parameters, optimizer state, averages and memory do not change, and only
  `step` counts up.

  Args:
    config: The run.
    learner: What the objective has made, see `Objective.make`.
    tx: The optimizer.
    state: The abstract state, with shardings.
    mesh: The run's mesh.
    observers: Callbacks with further metrics and memory of the step.
    trainable: Which parameters are trained; a batch may have the activations
      of its frozen part in place of images.

  Returns:
    A function. Its metrics are float32 scalars: `loss`, the objective's own
    (also means), `grad_norm` (before clipping), `param_norm` (after the
    update), `skipped` (1 if the update was not applied, otherwise 0) and
    `undecodable` (rows with mask False).
  """
  shardings = sharding.shardings_of(state)
  specs = collectives.manual_specs(shardings)
  fixed_specs, teacher_specs = _fixed_and_teachers(specs, learner)
  model = config.model
  most, fast = config.optim.microbatch, microbatch.fast_microbatch(config, mesh)

  def targets_of(params, fixed, teachers, batch, *args):
    """Returns the objective's targets of all rows of a device."""
    (average, frozen), (of_average, of_frozen) = teachers, teacher_specs
    whole = []
    if average is not None:
      mean = collectives.gather(average, of_average, model)
      whole.append(joined(mean, fixed))
    if frozen is not None:
      whose = learner.frozen.model.config
      whole.append(collectives.gather(frozen, of_frozen, whose))
    if not whole:
      whole.append(joined(params, fixed))
    whole = whole[0] if len(whole) == 1 else tuple(whole)
    return learner.targets(whole, batch, *args)

  def summed(params, fixed, batch, *args):
    """Sums over rows, so that microbatches and devices add up."""
    with trainable.applied(batch) as batch:
      loss, count, named = learner.loss(joined(params, fixed), batch, *args)
    return loss, (count, named)

  def sums_and_grads(params, fixed, teachers, memory, batch, rng, step):
    """Returns sums, gradients and memory of a device's rows.

    Args: the device's parts of parameters, and its rows.
    """
    params, fixed = collectives.gather(
      (params, fixed), (specs.params, fixed_specs), model
    )
    over, shared = collectives.Over(), {}
    if learner.targets is not None:
      targets = targets_of(
        params, fixed, teachers, batch, rng, step, memory, over
      )
      if targets.rows is not None:
        batch = {**batch, "targets": targets.rows}
      if targets.shared is not None:
        shared = {"shared": targets.shared}
      if targets.memory is not None:
        memory = targets.memory
    args = (rng, step, over) if learner.whole_batch else (rng, step)

    def of_rows(params, rows):
      return summed(params, fixed, {**rows, **shared}, *args)

    grad_fn = jax.value_and_grad(of_rows, has_aux=True)
    num_rows = len(jax.tree.leaves(batch)[0])
    number = 1
    if not learner.whole_batch:
      number = microbatch.num_microbatches(num_rows, most, fast)
    if number == 1:
      sums, grads = grad_fn(params, batch)
    else:

      def add(total, rows):
        added = jax.tree.map(
          lambda t, x: t + x.astype(t.dtype), total, grad_fn(params, rows)
        )
        return added, None

      microbatches = jax.tree.map(
        lambda x: x.reshape(number, num_rows // number, *x.shape[1:]), batch
      )
      one = jax.tree.map(lambda x: x[0], microbatches)
      sums = jax.eval_shape(
        lambda params, rows: grad_fn(params, rows)[0], params, one
      )
      zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
      total = jax.tree.map(zeros, (sums, params))
      (sums, grads), _ = jax.lax.scan(add, total, microbatches)
      grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, params)
    sums = jax.tree.map(collectives.total, sums)
    return sums, collectives.reduce(grads, specs.params), memory

  def on_devices(state: TrainState, batch: dict, rng: jax.Array):
    fixed, teachers = _fixed_and_teachers(state, learner)
    memory = state.memory.get(OBJECTIVE)
    fn = jax.shard_map(
      # The step is an operand of the program only if the objective reads it.
      lambda *args: sums_and_grads(*args, state.step),
      mesh=mesh,
      in_specs=(
        specs.params,
        fixed_specs,
        teacher_specs,
        P(),
        sharding.BATCH_SPEC,
        P(),
      ),
      out_specs=(P(), specs.params, P()),
      axis_names=collectives.manual_axes(mesh),
      check_vma=False,
    )
    return fn(state.params, fixed, teachers, memory, batch, rng)

  def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    root = jax.random.fold_in(jax.random.key(config.seed), 1)
    rng = jax.random.fold_in(root, state.step)
    rows = config.objective.paired(batch)
    sums, grads, objective_memory = on_devices(state, rows, rng)
    loss, (count, named) = sums
    mean = lambda total, count: total / jnp.maximum(count, 1.0)
    loss, grads = jax.tree.map(lambda x: mean(x, count), (loss, grads))
    named = {name: mean(*sums) for name, sums in named.items()}
    grad_norm = optax.tree.norm(grads)
    # A finite norm means that every square is finite, and with the gradients
    # and their squares all that an optimizer keeps of them.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    averages, more = {}, {}
    for name, average in state.averages.items():
      if learner.average is not None and name == _average_of(learner):
        weight = 1.0 - learner.average.at(state.step)
      else:
        weight = optim.ema_weight(config.optim.ema_decay, state.step)
      averages[name] = optim.moved(average, params, weight)
    memory = {}
    if OBJECTIVE in state.memory:
      memory[OBJECTIVE] = objective_memory
    if observers:
      trees = grads, updates, state.params
      observed = [unstack_blocks(tree, model) for tree in trees]
    for observer in observers:
      before = state.memory.get(observer.name)
      values, after = _observed(
        observer, {*METRICS, *named, *more}, state.step, *observed, before
      )
      more |= values
      if observer.name in state.memory:
        memory[observer.name] = after
    params, opt_state, averages, memory = jax.tree.map(
      lambda new, old: jnp.where(is_finite, new, old),
      (params, opt_state, averages, memory),
      (state.params, state.opt_state, state.averages, state.memory),
    )
    metrics = {
      "loss": loss,
      **named,
      "grad_norm": grad_norm,
      # Frozen layers count, because they are in the checkpoint.
      "param_norm": optax.tree.norm(saved_params(params, state.fixed)),
      **more,
      "skipped": 1.0 - is_finite,
      "undecodable": (~batch["mask"]).sum(dtype=jnp.float32),
    }
    state = state.replace(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      averages=averages,
      memory=memory,
    )
    return state, metrics

  return jax.jit(
    train_step,
    in_shardings=(shardings, NamedSharding(mesh, sharding.BATCH_SPEC)),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
    compiler_options=compiler_options(
      mesh.devices.flat[0].device_kind,
      microbatch.hidden_of_microbatch(config, mesh),
    ),
  )


def _average_of(learner: Learner) -> str:
  """Returns the key of a teacher's running mean in `TrainState.averages`."""
  return EMA if learner.average.is_published else TEACHER


def _fixed_and_teachers(
  state: TrainState, learner: Learner
) -> tuple[dict[str, Params], tuple[Params | None, Params | None]]:
  """Returns the model's fixed parameters, and the teachers' parameters.

  Args:
    state: A state, or a tree of its form.
    learner: What the objective has made.

  Returns:
    The fixed parameters; a running mean and a frozen teacher, each None if
    there is none.
  """
  fixed = {k: v for k, v in state.fixed.items() if k != TEACHER}
  average = None
  if learner.average is not None:
    average = state.averages[_average_of(learner)]
  return fixed, (average, state.fixed.get(TEACHER))
