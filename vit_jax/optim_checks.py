"""Errors of the optimizer's options that name parameters or layers."""

import jax
import numpy as np
from jaxtyping import PyTree

from vit_jax import names
from vit_jax.config import OptimConfig
from vit_jax.config.schema import EACH
from vit_jax.families import ModelConfig
from vit_jax.optim import make_optimizer
from vit_jax.options import nearest, shown, unexpected
from vit_jax.param_groups import has_layer, matches, path_of, trained


def errors(
  config: OptimConfig,
  params: PyTree,
  model: ModelConfig,
  own: str | None = None,
) -> list[str]:
  """Returns errors of the options that name parameters or layers.

  Args:
    config: The options.
    params: Parameters, or their shapes.
    model: The model of the parameters.
    own: Prefix of the parameters that an objective adds, or None.
  """
  leaves = {
    path_of(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  paths = [*leaves]
  patterns = {
    "freeze": config.freeze,
    "lr_scale": tuple(pattern for pattern, _ in config.lr_scales()),
    "lr_zero": tuple(pattern for pattern, _ in config.lr_zeros()),
    "clip_groups": tuple(g for g in config.clip_groups if g != EACH),
  }
  errors = [
    f"config.optim.{key}: no parameter matches {pattern!r}, expected paths such"
    f" as {paths[0]}.{nearest(pattern, paths)}"
    for key in patterns
    for pattern in patterns[key]
    if not any(matches(name, [pattern]) for name in paths)
  ]
  trained_names = [n for n in paths if not matches(n, config.freeze)]
  if not trained_names:
    freeze = ", ".join(config.freeze)
    expected = "patterns that leave some parameters to train"
    errors.append(unexpected("config.optim.freeze", freeze, expected))
  family = type(model).__name__
  if config.layer_decay is not None:
    wrong = f"config.optim.layer_decay: got {config.layer_decay}, expected None"
    unplaced = [
      name
      for name in trained_names
      if not (own and name.startswith(own)) and not has_layer(name, model)
    ]
    if not any(model.block_of(name) is not None for name in trained_names):
      errors.append(f"{wrong}: no block of {family}.BLOCKS is trained.")
    elif unplaced:
      errors.append(f"{wrong}: {family} declares no layer of {unplaced[0]}.")
  if trained_names and any(map(names.is_path, (config.name, config.schedule))):
    errors += _import_errors(config, params, model)
  if config.name == "muon" and not any(map(model.matrix, trained_names)):
    reason = f"another one: no kernel of {family}.MATRICES is trained"
    errors.append(unexpected("config.optim.name", "'muon'", reason))
  errors += [
    f"config.optim.name: got 'muon', but {family}.MATRICES declares"
    f" {numbers} dimensions of {name}, which has {len(np.shape(leaves[name]))}."
    for name in trained_names
    if config.name == "muon" and (numbers := model.matrix(name))
    if len(np.shape(leaves[name])) != sum(numbers) + model.is_scanned(name)
  ]
  return errors


def _import_errors(
  config: OptimConfig, params: PyTree, model: ModelConfig
) -> list[str]:
  """Returns why an imported optimizer or schedule cannot be used."""
  try:
    tx, _ = make_optimizer(config, config.warmup_steps + 1, model)
  except ValueError as e:
    return [str(e)]
  params = trained(params, config.freeze)
  try:
    jax.eval_shape(lambda x: tx.update(x, tx.init(x), x), params)
  except Exception as e:  # code of one's own may raise anything
    return [
      f"config.optim.name: got {shown(config.name)}, whose init or update"
      f" raises {type(e).__name__}: {e}."
    ]
  return []
