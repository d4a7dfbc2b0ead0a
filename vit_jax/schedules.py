"""Learning rate as a function of the number of updates already applied."""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from vit_jax.config import OptimConfig

Schedule = Callable  # Number of updates applied -> learning rate, float32.


def make_schedule(config: OptimConfig, total_steps: int) -> Schedule:
  """Linear warm-up from 0 to `lr`, then the decay that the config names.

  With s updates applied, w = warmup_steps, T = total_steps, and progress
  p = (s - w) / (T - w), held between 0 and 1:

    s < w      lr s / w
    cosine     end_lr + (lr - end_lr) (1 + cos(pi p)) / 2
    linear     lr + (end_lr - lr) p
    rsqrt      lr / sqrt(1 + (s - w) / rsqrt_timescale)
    constant   lr

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
  """Learning rate by steps since the end of the warm-up."""
  lr, end_lr = config.lr, config.end_lr
  if config.schedule == "cosine":
    # optax has the floor as a share of the peak; a peak of 0 has no shares.
    share = end_lr / lr if lr else 0.0
    return optax.cosine_decay_schedule(lr, decay_steps, alpha=share)
  if config.schedule == "linear":
    return optax.linear_schedule(lr, end_lr, decay_steps)
  if config.schedule == "rsqrt":
    # Steps of the warm-up count as 0: the joined schedule looks at both
    # branches, and a root of a negative number would be NaN.
    since = lambda step: jnp.maximum(step, 0) / config.rsqrt_timescale
    return lambda step: lr / jnp.sqrt(1.0 + since(step))
  if config.schedule == "constant":
    return optax.constant_schedule(lr)
  raise ValueError(
    f"config.optim.schedule: got {config.schedule!r}, expected one of cosine,"
    " linear, rsqrt, constant."
  )
