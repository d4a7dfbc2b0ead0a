"""The update rule (clip, scale, decay) and the learning rate's schedule."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike, PyTree

from vit_jax.config import OptimConfig
from vit_jax.options import nearest

# Number of updates applied -> learning rate, float32.
Schedule = Callable[[ArrayLike], jax.Array]

RSQRT_TIMESCALE = 10_000  # steps; big_vision's default


def make_optimizer(
  config: OptimConfig, total_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
  """Builds the optimizer and the schedule that it follows.

  The update of a parameter w with gradient g, after s updates:

    g <- g min(1, clip_norm / |g|)            |g| over all parameters
    u = momentum-and-scale(g)                 adamw, or sgd's accumulator
    w <- w - lr(s) (u + weight_decay w)       decay only where decay_mask says

  Weight decay is decoupled (never in the moments) and multiplied by the
  learning rate, for adamw and sgd alike, as in the ViT paper, AugReg, optax
  and PyTorch. big_vision's `wd` is not multiplied by it: its 1e-4 at lr 1e-3
  is 0.1 here.

  The state is a plain tree: the moments repeat the tree of the parameters
  below them (so a sharding is found by the end of the path), the rest are
  scalar counts.

  Args:
    config: `accumulator_dtype` is the type in which sgd's accumulator or
      adamw's first moment is stored between steps, rounded to nearest; it is
      decayed and added to in float32, and this step's update is not rounded.
      adamw's second moment always stays in float32.
    total_steps: Length of the run, in updates.

  Why to nearest: over 200 steps, against float32 accumulators, the sum of the
  updates was off by 0.10 to 0.21 % (root mean square over 4,096 weights, whose
  gradients were 1 to 10 times as noisy as large) and by less than 0.01 % in the
  mean; rounded stochastically, by 0.14 to 0.30 %. With optax's own decay, which
  for a bfloat16 accumulator is 0.8984, it was 0.8 to 1.5 % too small. Only for
  gradients that never change is stochastic rounding better: rounded to nearest,
  an accumulator stops up to 4 % before its limit (the sums were 1.7 % too
  small), where a step adds less than half of its last bit.

  Raises:
    ValueError: The optimizer is unknown; or as `make_schedule`.

  Source: arXiv:2010.11929, section 4.1 and appendix B.1; arXiv:1711.05101.
  """
  schedule = make_schedule(config, total_steps)
  parts = []
  if config.clip_norm is not None:
    parts.append(optax.clip_by_global_norm(config.clip_norm))
  if config.name not in OPTIMIZERS:
    raise ValueError(
      f"config.optim.name: got {config.name!r}, expected one of"
      f" {', '.join(OPTIMIZERS)}.{nearest(config.name, OPTIMIZERS)}"
    )
  parts.append(_reads_float32(OPTIMIZERS[config.name](config)))
  if config.weight_decay:
    parts.append(optax.add_decayed_weights(config.weight_decay, decay_mask))
  parts.append(optax.scale_by_learning_rate(schedule))
  return optax.chain(*parts), schedule


def _adamw(config: OptimConfig) -> optax.GradientTransformation:
  return optax.scale_by_adam(
    config.beta1, config.beta2, mu_dtype=config.accumulator_dtype
  )


def _sgd(config: OptimConfig) -> optax.GradientTransformation:
  return optax.trace(
    config.momentum, accumulator_dtype=config.accumulator_dtype
  )


# What a gradient becomes before weight decay and learning rate.
OPTIMIZERS = {
  "adamw": _adamw,
  "sgd": _sgd,
}


def _reads_float32(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Casts bfloat16 accumulators to float32 before tx uses them.

  Otherwise optax multiplies a bfloat16 accumulator by a decay rounded to
  bfloat16, and rounds the product. It casts what it stores itself.
  """

  def update(updates, state, params=None):
    state = jax.tree.map(
      lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state
    )
    return tx.update(updates, state, params)

  return optax.GradientTransformation(tx.init, update)


def decay_mask(params: PyTree) -> PyTree:
  """Returns True where weight decay acts: the leaves named `kernel`.

  So kernels of products and convolutions decay; biases, scales and offsets of
  normalisations, class token, position embedding and probe do not.

  Source: big_vision, mask `.*/kernel$`. (The code of 2020 is believed to have
    decayed everything.)

  Example:
    >>> decay_mask({"head": {"kernel": 0.0, "bias": 0.0}, "cls": 0.0})
    {'cls': False, 'head': {'bias': False, 'kernel': True}}
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: _name(path[-1]) == "kernel", params
  )


def trained(tree: PyTree, patterns: Sequence[str]) -> PyTree:
  """Returns a tree of parameters without those that are frozen.

  These are None, which jax takes for no leaf: they get no gradient, no update
  and no state of the optimizer.

  Args:
    tree: Parameters, or a tree of the same form.
    patterns: config.optim.freeze, with * and ? as in file names.

  Example:
    >>> params = {"head": {"kernel": 1.0}, "Transformer": {"scale": 2.0}}
    >>> trained(params, ["Transformer/*"])
    {'Transformer': {'scale': None}, 'head': {'kernel': 1.0}}
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: None if is_frozen(_path_name(path), patterns) else x, tree
  )


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
  """Whether a parameter, such as "head/kernel", matches config.optim.freeze."""
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def freeze_errors(patterns: Sequence[str], params: PyTree) -> list[str]:
  """Returns errors of config.optim.freeze.

  Args:
    patterns: The option.
    params: Parameters, or their shapes.
  """
  names = [
    _path_name(path)
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
  ]
  errors = [
    f"config.optim.freeze: got {pattern!r}, which no parameter matches;"
    f" expected a pattern of paths such as {names[0]}.{nearest(pattern, names)}"
    for pattern in patterns
    if not any(is_frozen(name, [pattern]) for name in names)
  ]
  if all(is_frozen(name, patterns) for name in names):
    errors.append(
      f"config.optim.freeze: got {', '.join(patterns)}, which leaves nothing to"
      " train; expected patterns that leave some parameters."
    )
  return errors


def replaced(tree: PyTree, part: PyTree) -> PyTree:
  """Returns a tree with the leaves that `trained` left in `part`."""
  return jax.tree.map(
    lambda new, old: old if new is None else new,
    part,
    tree,
    is_leaf=lambda x: x is None,
  )


def _path_name(path: Sequence[Any]) -> str:
  return "/".join(_name(key) for key in path)


def ema_weight(decay: float, step: ArrayLike) -> jax.Array:
  """Returns the weight of an update's parameters in their running average.

  max(1 - decay, 9 / (10 + step)): the decay rises as (1 + step) / (10 + step)
  until it is `decay`. Early averages so reach back about a ninth of the run,
  and after n updates 1 / binomial(n + 9, 9) of the start is left: 1e-5 after
  ten. With 0.9999 throughout, 95 % would be left after 500.

  Args:
    decay: config.optim.ema_decay, 0 to 1; reached after (10 decay - 1) / (1 -
      decay) updates, such as 8,990 for 0.999.
    step: Updates applied before this one.

  Source: tf.train.ExponentialMovingAverage, argument `num_updates`. (How the
    average of arXiv:2010.11929, section 4.1, was started is not known.)
  """
  return jnp.maximum(1.0 - decay, 9.0 / (10.0 + step))


def ema(
  average: PyTree, params: PyTree, decay: float, step: ArrayLike
) -> PyTree:
  """Moves a running average of the parameters one step towards them.

  average <- average + ema_weight(decay, step) (params - average)

  The difference form is needed because 0.9999 x + 0.0001 y rounds off much of
  what the second term adds. The average starts as the initial parameters.

  Args:
    average: The average after the previous step; float32.
    params: Parameters after this step's update.
    decay: Decay per step, 0 to 1; in the end the average reaches back about 1 /
      (1 - decay) steps.
    step: Updates applied before this one.

  Example:
    >>> moved = ema({"w": 1.0}, {"w": 3.0}, decay=0.75, step=1000)
    >>> float(moved["w"])
    1.5
  """
  weight = ema_weight(decay, step)
  return jax.tree.map(
    lambda old, new: old + weight * (new - old), average, params
  )


def _name(key: Any) -> str:
  """Returns the last word of a path, for every kind of node."""
  return str(getattr(key, "key", getattr(key, "name", key)))


def make_schedule(config: OptimConfig, total_steps: int) -> Schedule:
  """Linear warm-up from 0 to `lr`, then the decay that the config names.

  With s updates applied, w = warmup_steps, T = total_steps, and progress
  p = (s - w) / (T - w), held between 0 and 1:

    s < w      lr s / w
    cosine     end_lr + (lr - end_lr) (1 + cos(pi p)) / 2
    linear     lr + (end_lr - lr) p
    rsqrt      lr / sqrt(1 + (s - w) / 10,000)
    constant   lr
    step       lr / 10^k, k the number of decay_at that s / T has reached

  So the first update of a run with warm-up has rate 0, as in big_vision; the
  update after w others has the peak; end_lr is reached after T updates, which
  is one more than the last update sees.

  Args:
    config: The rate is per step; lengths are in steps.
    total_steps: Length of the run, in updates.

  Raises:
    ValueError: The warm-up does not end before the run, or the decay is
      unknown.

  Source: arXiv:2010.11929, appendix B.1; big_vision `utils.py`,
    `create_learning_rate_schedule`.

  Example:
    >>> config = OptimConfig(lr=0.5, warmup_steps=10)
    >>> lr = make_schedule(config, total_steps=110)
    >>> [round(float(lr(s)), 4) for s in (0, 5, 10, 60, 110)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
  """
  warmup = config.warmup_steps
  if not 0 <= warmup < total_steps:
    raise ValueError(
      f"config.optim.warmup_steps: got {warmup}, expected 0 or more and less"
      f" than the {total_steps} steps of the run. Lower it, or raise"
      " config.total_steps or config.total_epochs."
    )
  decay = _decay(config, total_steps - warmup)
  if warmup:
    rise = optax.linear_schedule(0.0, config.lr, warmup)
    decay = optax.join_schedules([rise, decay], [warmup])
  return lambda step: jnp.asarray(decay(step), jnp.float32)


def _decay(config: OptimConfig, decay_steps: int) -> Schedule:
  """Returns the learning rate by steps since the end of the warm-up."""
  lr, end_lr = config.lr, config.end_lr
  if config.schedule == "cosine":
    # optax takes the floor as a share of the peak; a peak of 0 has none.
    share = end_lr / lr if lr else 0.0
    return optax.cosine_decay_schedule(lr, decay_steps, alpha=share)
  if config.schedule == "linear":
    return optax.linear_schedule(lr, end_lr, decay_steps)
  if config.schedule == "rsqrt":
    # Steps of the warm-up count as 0: the joined schedule evaluates both
    # branches, and a root of a negative number would be NaN.
    since = lambda step: jnp.maximum(step, 0) / RSQRT_TIMESCALE
    return lambda step: lr / jnp.sqrt(1.0 + since(step))
  if config.schedule == "constant":
    return optax.constant_schedule(lr)
  if config.schedule == "step":
    total = decay_steps + config.warmup_steps
    at = [round(s * total) - config.warmup_steps for s in config.decay_at]
    # In a short run several may be at the same step.
    factors = {step: 0.1 ** at.count(step) for step in at}
    return optax.piecewise_constant_schedule(lr, factors)
  raise ValueError(
    f"config.optim.schedule: got {config.schedule!r}, expected one of cosine,"
    " linear, rsqrt, constant, step."
  )
