"""Learning rates: warm-up, then a decay."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike

from vit_jax import names
from vit_jax.config import OptimConfig
from vit_jax.options import shown

# Number of updates applied -> learning rate, float32.
Schedule = Callable[[ArrayLike], jax.Array]

RSQRT_TIMESCALE = 10_000  # steps; big_vision's default


def make_schedule(config: OptimConfig, total_steps: int) -> Schedule:
  """Linear warm-up from 0 to `lr`, then the decay that the config names.

  With s updates applied, w = warmup_steps, T = total_steps, and progress
  p = (s - w) / (T - w), clipped to 0..1:

    s < w      lr s / w
    cosine     end_lr + (lr - end_lr) (1 + cos(pi p)) / 2
    linear     lr + (end_lr - lr) p
    rsqrt      lr / sqrt(1 + (s - w) / 10,000)
    constant   lr
    step       lr / 10^k, where s / T has reached k numbers of decay_at

  With warm-up, the first update has rate 0, as in big_vision, and update w + 1
  has the peak. The rate is end_lr at s = T, one step after the last update.
  An imported schedule decides the warm-up, too; see `_imported`.

  Args:
    config: The rate is per step; lengths are in steps.
    total_steps: Length of the run, in updates.

  Returns:
    The learning rate as a function of s.

  Raises:
    ValueError: The warm-up does not end before the run, or the decay is
      unknown or cannot be imported.

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
  if names.is_path(config.schedule):
    return _imported(config, total_steps)
  decay = _decay(config, total_steps - warmup)
  if warmup:
    rise = optax.linear_schedule(0.0, config.lr, warmup)
    decay = optax.join_schedules([rise, decay], [warmup])
  return lambda step: jnp.asarray(decay(step), jnp.float32)


def _imported(config: OptimConfig, total_steps: int) -> Schedule:
  """Returns an imported schedule, with its warm-up.

  `make(lr, warmup_steps, total_steps, ...)`, also with the arguments in
  brackets, returns a function of the updates applied, as optax's schedules are.

  Raises:
    ValueError: The function or its module cannot be imported, it raises an
      error, or its result is no rate.
  """
  where = "config.optim.schedule"
  path, text = names.split(config.schedule)
  make = names.resolve(path, {}, where)
  arguments = names.keywords(text or "", where)
  run = dict(
    lr=config.lr, warmup_steps=config.warmup_steps, total_steps=total_steps
  )
  got = f"{where}: got {shown(config.schedule)}"
  try:
    schedule = make(**run, **arguments)
    shape = jax.eval_shape(
      lambda step: jnp.asarray(schedule(step), jnp.float32),
      jax.ShapeDtypeStruct((), jnp.int32),
    ).shape
  except Exception as e:  # a function of one's own may raise anything
    raise ValueError(f"{got}, which raises {type(e).__name__}: {e}.") from e
  if shape:
    raise ValueError(f"{got}, whose rate has the shape {shape}, expected ().")
  return lambda step: jnp.asarray(schedule(step), jnp.float32)


def weight_decay(config: OptimConfig, total_steps: int) -> float | Schedule:
  """Returns the weight decay: a number, or a function of the updates applied.

  With s updates applied, T = total_steps and p = s / T, clipped to 0..1:

    weight_decay_end + (weight_decay - weight_decay_end) (1 + cos(pi p)) / 2

  Source: facebookresearch/dino and dinov2. (Their learning rate differs from
    `make_schedule`: it rises by lr / (w - 1) a step and has the peak in the
    updates w and w + 1; the cosine after it is the same.)

  Example:
    >>> config = OptimConfig(weight_decay=0.04, weight_decay_end=0.4)
    >>> decay = weight_decay(config, total_steps=100)
    >>> [round(float(decay(s)), 4) for s in (0, 50, 100)]
    [0.04, 0.22, 0.4]
  """
  start, end = config.weight_decay, config.weight_decay_end
  if end is None:
    return start
  rest = optax.cosine_decay_schedule(start - end, total_steps)
  return lambda step: end + rest(step)


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
