"""Optimizers: clipping, update rule, weight decay, running averages."""

import collections
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import ArrayLike, PyTree
from optax import contrib

from vit_jax import names
from vit_jax.config import OptimConfig
from vit_jax.config.schema import EACH
from vit_jax.families import ModelConfig
from vit_jax.options import nearest, shown
from vit_jax.param_groups import decay_mask, matches, path_of, rate_factors
from vit_jax.schedules import Schedule, make_schedule, weight_decay

LION_DECAY = 0.99  # of the accumulator; arXiv:2302.06675, section 3.2
MUON_MOMENTUM = 0.95  # https://github.com/KellerJordan/Muon
# Root mean square of Muon's updates, about as for Adam: arXiv:2502.16982,
# section 2.2. So one learning rate serves both.
MUON_RMS = 0.2


def make_optimizer(
  config: OptimConfig, total_steps: int, model: ModelConfig
) -> tuple[optax.GradientTransformation, Schedule]:
  """Builds the optimizer and the schedule that it follows.

  The update of a parameter w with gradient g, after s updates:

    g <- g min(1, clip_norm / |g|)            |g| over all parameters, or
                                              over a group of clip_groups
    u = momentum-and-scale(g)                 see OPTIMIZERS
    u <- u + weight_decay(s) w                only where decay_mask is True
    u <- u |w| / |u|                          only lamb, see _by_trust_ratio
    w <- w - lr(s) f u                        f of `rate_factors`; 0 in the
                                              first steps of lr_zero

  An imported optimizer (`optax:contrib.ademamix`, see `_imported`) stands for
  the second line. It stands for the third, too, if it has the arguments
  weight_decay and mask, and for the product with lr(s) if it has learning_rate.

  Weight decay is decoupled (never in the moments) and multiplied by the
  learning rate for every optimizer, as in the ViT paper, AugReg, optax and
  PyTorch. big_vision does not multiply: its `wd` of 1e-4 at lr 1e-3 is 0.1
  here.

  Norms and products of a whole array are computed for each block separately,
  also if a scan stacks the blocks.

  The state is a plain tree: the moments repeat the tree of the parameters (so
  the end of a path decides the sharding), the rest are counts and constants.
  adafactor's `v_row` and `v_col` repeat the tree with fewer dimensions.

  Args:
    config: `accumulator_dtype` is the type in which the accumulator, or first
      moment, is stored between steps, rounded to nearest (stochastic rounding
      was less accurate, see benchmarks/notes/performance_log.md). It is decayed
      and added to in float32, and the update of the step is not rounded. Second
      moments are always float32.
    total_steps: Length of the run, in updates.
    model: The model, which declares its blocks and matrices.

  Returns:
    The optimizer; the learning rate as a function of the updates applied.

  Raises:
    ValueError: The optimizer is unknown or cannot be made; or as
      `make_schedule`.

  Source: arXiv:2010.11929, section 4.1 and appendix B.1; arXiv:1711.05101.
  """
  schedule = make_schedule(config, total_steps)
  decay = weight_decay(config, total_steps)
  parts = []
  if config.clip_norm is not None:
    parts.append(_clipping(config, model))
  if names.is_path(config.name):
    parts += _imported(config, schedule, decay, model)
  else:
    kind = names.resolve(config.name, OPTIMIZERS, "config.optim.name")
    parts.append(_reads_float32(kind.scale(config, model)))
    if decay:
      parts.append(optax.add_decayed_weights(decay, decay_mask))
    if kind.has_trust_ratio:
      # Only kernels, as in apex and timm: a parameter without decay whose norm
      # is small, such as a LayerScale of 1e-6, would get a small rate.
      ratio = optax.stateless(functools.partial(_by_trust_ratio, model=model))
      parts.append(_by_blocks(optax.masked(ratio, decay_mask), model))
    parts.append(optax.scale_by_learning_rate(schedule))
  if config.layer_decay is not None or config.lr_scale:
    parts.append(
      optax.stateless(
        lambda updates, _: jax.tree.map(
          lambda u, f: u * jnp.asarray(f, u.dtype),
          updates,
          rate_factors(config, updates, model),
        )
      )
    )
  if config.lr_zero:
    parts += [
      _zero_at_first(pattern, steps) for pattern, steps in config.lr_zeros()
    ]
  return optax.chain(*parts), schedule


def _zero_at_first(pattern: str, steps: int) -> optax.GradientTransformation:
  """Returns what makes the first updates of some parameters zero."""
  factor = lambda step: jnp.where(step < steps, 0.0, 1.0)

  def mask(tree):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: matches(path_of(path), [pattern]), tree
    )

  return optax.masked(optax.scale_by_schedule(factor), mask)


def _clipping(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  """Clips gradients by the norm of all, of each group, or of each array."""
  clip, groups = optax.clip_by_global_norm(config.clip_norm), config.clip_groups
  if not groups:
    return clip
  if groups == (EACH,):

    def clip_each(grads, _):
      one = lambda g: clip.update(g, optax.EmptyState())[0]
      return jax.tree.map(one, grads)

    return _by_blocks(optax.stateless(clip_each), model)

  def group(path, _):
    names = (g for g in groups if matches(path_of(path), [g]))
    return next(names, "")

  return optax.partition(
    dict.fromkeys(("", *groups), clip),
    lambda tree: jax.tree_util.tree_map_with_path(group, tree),
  )


def _adamw(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  return optax.scale_by_adam(
    config.beta1, config.beta2, mu_dtype=config.accumulator_dtype
  )


def _sgd(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  return optax.trace(
    config.momentum, accumulator_dtype=config.accumulator_dtype
  )


def _lion(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  """Lion: sign(beta1 m + (1 - beta1) g).

  Source: arXiv:2302.06675, algorithm 2.
  """
  return optax.scale_by_lion(
    config.beta1, LION_DECAY, mu_dtype=config.accumulator_dtype
  )


def _adafactor(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  """Adam with a factored second moment and no first moment; then momentum.

  The second moment of a kernel is factored into rows and columns, for its two
  largest dimensions if both are 32 or more. Its decay in step t is 1 - t^-0.8,
  at most beta2.

  Source: arXiv:2106.04560, section 3.4; big_vision, optax.py,
    `scale_by_adafactor`.
  """

  def decay(step, exponent):
    return jnp.minimum(config.beta2, 1.0 - (step + 1.0) ** -exponent)

  factored = optax.scale_by_factored_rms(
    min_dim_size_to_factor=32, decay_rate_fn=decay
  )
  momentum = optax.ema(
    config.momentum, debias=False, accumulator_dtype=config.accumulator_dtype
  )
  return _by_blocks(optax.chain(factored, momentum), model)


def _muon(
  config: OptimConfig, model: ModelConfig
) -> optax.GradientTransformation:
  """Orthogonalised momentum for `model.MATRICES`, Adam for all others.

    m <- 0.95 m + 0.05 g                      bias-corrected, Nesterov
    u = 0.2 sqrt(max(inputs, outputs)) NS(m)  root mean square about 0.2

  NS is five Newton-Schulz steps X <- 3.4445 X - 4.7750 A X + 2.0315 A A X with
  A = X X^T, from m / |m|. The result is near U V^T, where m = U S V^T.

  Source: https://kellerjordan.github.io/posts/muon; arXiv:2502.16982.
  """

  def dimensions(tree):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: _dimensions(model.matrix(path_of(path))), tree
    )

  def scaled(updates, _):
    def scale(update, numbers):
      sizes = [
        math.prod(update.shape[i] for i in np.atleast_1d(axes))
        for axes in numbers
      ]
      return MUON_RMS * math.sqrt(max(sizes)) * update

    return jax.tree.map(scale, updates, dimensions(updates))

  orthogonal = contrib.scale_by_muon(
    beta=MUON_MOMENTUM,
    mu_dtype=config.accumulator_dtype,
    weight_dimension_numbers=dimensions,
  )
  of_kind = {
    "matrix": optax.chain(orthogonal, optax.stateless(scaled)),
    "other": _adamw(config, model),
  }

  def kinds(tree):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: "matrix" if model.matrix(path_of(path)) else "other",
      tree,
    )

  return _by_blocks(optax.partition(of_kind, kinds), model)


def _dimensions(
  numbers: tuple[int, int] | None,
) -> contrib.MuonDimensionNumbers | None:
  """Returns the dimensions of a kernel of one block, see `MATRICES`."""
  if numbers is None:
    return None
  inputs, outputs = numbers
  axes = tuple(range(inputs)), tuple(range(inputs, inputs + outputs))
  return contrib.MuonDimensionNumbers(*axes)


class Optimizer(NamedTuple):
  """An update rule.

  Attributes:
    scale: Makes what a gradient becomes before weight decay and learning rate.
    has_trust_ratio: Whether updates are scaled to the norms of their kernels,
      after weight decay.
  """

  scale: Callable[[OptimConfig, ModelConfig], optax.GradientTransformation]
  has_trust_ratio: bool = False


# The choices of config.optim.name; `config.schema.READ_BY` has their options.
OPTIMIZERS = {
  "adamw": Optimizer(_adamw),
  "sgd": Optimizer(_sgd),
  "lamb": Optimizer(_adamw, has_trust_ratio=True),
  "lion": Optimizer(_lion),
  "adafactor": Optimizer(_adafactor),
  "muon": Optimizer(_muon),
}

MASKS = ("mask", "weight_decay_mask")  # optax's names of an argument


def _imported(
  config: OptimConfig,
  schedule: Schedule,
  decay: float | Schedule,
  model: ModelConfig,
) -> list[optax.GradientTransformation]:
  """Returns an imported optimizer, with decay and rate where it has none.

  It is a function of optax, or one of one's own, that returns a
  `GradientTransformation`. The arguments in brackets are passed on.

  - If the function has an argument `learning_rate`, it gets the schedule of the
    run, and its updates are applied as they are. Otherwise they are multiplied
    by the learning rate.
  - If it has `weight_decay` and a mask (an argument of `MASKS`), it gets
    config.optim.weight_decay, also 0, and `decay_mask`. Otherwise the decay is
    added as for every optimizer. A `weight_decay` without a mask is set to 0.

  It must need no more than gradients and parameters. Evaluations score the
  parameters of training; so a schedule-free optimizer is scored without its
  average.

  Raises:
    ValueError: The function or its module cannot be imported, it has no such
      argument, it raises an error, or it returns something else.
  """
  where = "config.optim.name"
  path, text = names.split(config.name)
  make = names.resolve(path, {}, where)
  arguments = names.keywords(text or "", where)
  got = f"{where}: got {shown(config.name)}"
  if not callable(make):
    raise ValueError(
      f"{got}, which is {shown(make)}, expected a function that returns an"
      " optax.GradientTransformation."
    )
  parameters = inspect.signature(make).parameters
  given = {}
  if has_rate := "learning_rate" in parameters:
    given["learning_rate"] = schedule
  mask = next((name for name in MASKS if name in parameters), None)
  has_decay = "weight_decay" in parameters and mask is not None
  if has_decay:
    given |= {"weight_decay": decay, mask: decay_mask}
  elif "weight_decay" in parameters:
    given["weight_decay"] = 0.0
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  own = [name for name in parameters if name not in given]
  for name in arguments:
    if name in given:
      raise ValueError(
        f"{got}, expected no {name} in brackets: the options of config.optim"
        " (lr, schedule, weight_decay) decide it."
      )
    if name not in own and not takes_any:
      raise ValueError(
        f"{got}, but {path} has no argument {name!r}; expected some of"
        f" {', '.join(own)}.{nearest(name, own)}"
      )
  try:
    tx = make(**arguments, **given)
  except Exception as e:  # a function of one's own may raise anything
    raise ValueError(f"{got}, which raises {type(e).__name__}: {e}.") from e
  if not (hasattr(tx, "init") and hasattr(tx, "update")):
    raise ValueError(
      f"{got}, which returns {shown(tx)}, expected an"
      " optax.GradientTransformation."
    )
  parts = [_by_separate_blocks(tx, model)]
  if decay and not has_decay:
    # Behind an optimizer with a rate of its own, the rate is in the decay.
    at = decay if callable(decay) else lambda step: decay
    by_rate = lambda step: -at(step) * schedule(step)
    rate = by_rate if has_rate else decay
    parts.append(optax.add_decayed_weights(rate, decay_mask))
  if not has_rate:
    parts.append(optax.scale_by_learning_rate(schedule))
  return parts


def _by_trust_ratio(
  updates: PyTree, params: PyTree, model: ModelConfig
) -> PyTree:
  """Scales each update u of a parameter w by |w| / |u|, or by 1 if one is 0.

  The norms are taken over a whole array. Query, key and value of a block have
  one ratio together, because they are one array in the code of DeiT III and
  timm.

  Source: arXiv:1904.00962, algorithm 2.
  """

  def group(path):
    name = path_of(path)
    if model.QKV is None or model.block_of(name) is None:
      return name
    return re.sub(rf"/({model.QKV})$", "", name)

  def norms(tree):
    squares = collections.Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
      squares[group(path)] += jnp.sum(jnp.square(x))
    return {k: jnp.sqrt(v) for k, v in squares.items()}

  of_params, of_updates = norms(params), norms(updates)

  def scaled(path, update):
    w, u = of_params[group(path)], of_updates[group(path)]
    return update * jnp.where((w == 0) | (u == 0), 1.0, w / u)

  return jax.tree_util.tree_map_with_path(scaled, updates)


def _by_blocks(
  tx: optax.GradientTransformation, model: ModelConfig
) -> optax.GradientTransformation:
  """Applies tx to every block of a scan separately, as in a loop over blocks.

  Args:
    tx: Treats each parameter separately.
    model: The model, which declares where the blocks of a scan are.
  """

  def axes(tree):
    # Those of the state have the paths of their parameters at the end.
    return jax.tree_util.tree_map_with_path(
      lambda path, _: 0 if model.is_scanned(path_of(path)) else None, tree
    )

  def over_blocks(fn, out_axes, *arguments):
    in_axes = tuple(map(axes, arguments))
    if not jax.tree.leaves(in_axes):  # no blocks are stacked
      return fn(*arguments)
    return jax.vmap(fn, in_axes, out_axes)(*arguments)

  def init(params):
    shapes = jax.eval_shape(tx.init, params)
    return over_blocks(tx.init, axes(shapes), params)

  def update(updates, state, params):
    return over_blocks(
      tx.update, (axes(updates), axes(state)), updates, state, params
    )

  return optax.GradientTransformation(init, update)


def _by_separate_blocks(
  tx: optax.GradientTransformation, model: ModelConfig
) -> optax.GradientTransformation:
  """Applies tx as `_by_blocks`, if it treats each parameter separately.

  Otherwise, as for a norm over all parameters, tx sees the stacked blocks.
  """
  by_blocks = _by_blocks(tx, model)

  def chosen(tree):
    try:
      jax.eval_shape(lambda x: by_blocks.update(x, by_blocks.init(x), x), tree)
    except ValueError:
      # By jax.vmap: a result without blocks depends on them, such as a norm.
      return tx
    return by_blocks

  def init(params):
    return chosen(params).init(params)

  def update(updates, state, params):
    return chosen(params).update(updates, state, params)

  return optax.GradientTransformation(init, update)


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


def ema_weight(decay: float, step: ArrayLike) -> jax.Array:
  """Returns the weight of new parameters in their running average.

  max(1 - decay, 9 / (10 + step)): the decay rises as (1 + step) / (10 + step)
  until it is `decay`. So an early average covers about the last ninth of the
  run, and after n updates the start has a weight of 1 / binomial(n + 9, 9):
  1e-5 after ten. With a constant 0.9999 it would be 95 % after 500.

  Args:
    decay: config.optim.ema_decay, 0 to 1; reached after (10 decay - 1) / (1 -
      decay) updates, such as 8,990 for 0.999.
    step: Updates applied before this one.

  Source: tf.train.ExponentialMovingAverage, argument `num_updates`. (How the
    average of arXiv:2010.11929, section 4.1, was started is not known.)
  """
  return jnp.maximum(1.0 - decay, 9.0 / (10.0 + step))


def moved(average: PyTree, params: PyTree, weight: ArrayLike) -> PyTree:
  """Moves a running average of the parameters one step towards them.

  average <- average + weight (params - average)

  The difference is needed because 0.9999 x + 0.0001 y rounds off much of the
  second term. The average starts as the initial parameters.

  Args:
    average: The average after the previous step; float32.
    params: Parameters after this step's update.
    weight: Weight of the parameters, 0 to 1, such as `ema_weight`.

  Example:
    >>> moved({"w": 1.0}, {"w": 3.0}, 0.25)
    {'w': 1.5}
  """
  return jax.tree.map(
    lambda old, new: old + weight * (new - old), average, params
  )
