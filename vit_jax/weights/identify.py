"""Finds the model of a set of parameters, by names and shapes alone."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.config import ConfigError, ModelConfig, model_from_dict
from vit_jax.families import model_config
from vit_jax.families.resnet import RESNETS
from vit_jax.families.vit import SIZES, Size
from vit_jax.options import shown
from vit_jax.weights.weights_file import POS_EMBEDDING

_BLOCK = "Transformer/encoderblock_0/"
_ATTENTION = _BLOCK + "MultiHeadDotProductAttention_0/"
_QUERY = _ATTENTION + "query/kernel"
_DENSE = _BLOCK + "MlpBlock_0/Dense_0/kernel"
# The arrays of a Transformer that state its size -> number of dimensions.
NEEDED = {_QUERY: 3, _DENSE: 2}
# Families whose parameters are recognised by their names; a file with those of
# another family has to state the family.
RECOGNISED = ("vit", "bit", "bit_v1")


def identify(
  params: Mapping[str, Any], options: Mapping[str, Any]
) -> ModelConfig:
  """Returns the model that these parameters belong to.

  Args:
    params: Our flat names -> anything with a shape; blocks not stacked.
    options: Options of the model known from elsewhere; they have precedence.

  Raises:
    ValueError: They are the parameters of none of our models.
  """
  names = set(params)
  if options.get("name", "vit") not in RECOGNISED:
    return _config(options)
  if "embedding/kernel" in names:
    inferred = _transformer(params)
  elif "conv_root/kernel" in names and _blocks(names):
    inferred = _resnet(params)
  else:
    some = ", ".join(sorted(names)[:4]) or "none"
    raise ValueError(
      f"got {len(names)} parameters, such as {some}; expected those of a Vision"
      " Transformer (embedding/kernel, Transformer/encoderblock_0/...), of a"
      " hybrid, or of a BiT ResNet (conv_root/kernel, block1/unit1/...)."
    )
  model = _config({"name": "vit", **inferred, **options})
  own = _config({"name": "vit", **inferred})
  if errors := _contradictions(model, own) or list(model.errors()):
    raise ValueError(" ".join(errors))
  return model


def _contradictions(model: ModelConfig, own: ModelConfig) -> list[str]:
  """Returns where stated options contradict the arrays.

  Args:
    model: The model by options and arrays.
    own: The model by the arrays alone.
  """
  if model.name != own.name:
    return [f"name: got {model.name!r}, expected {own.name!r} by the arrays."]
  pairs = {"stage_blocks": [m.stages and m.stages.blocks for m in (model, own)]}
  if model.name == "vit":
    pairs["depth"] = [m.size.depth for m in (model, own)]
  return [
    f"{key}: got {shown(stated)}, expected {shown(has)} by the arrays."
    for key, (stated, has) in pairs.items()
    if stated != has
  ]


def _config(options: Mapping[str, Any]) -> ModelConfig:
  """Returns the model of some options.

  Raises:
    ValueError: Some are no options of this family.
  """
  try:
    return model_from_dict(dict(options))
  except ConfigError as e:
    raise ValueError(" ".join(e.errors)) from None


def num_classes(params: Mapping[str, Any]) -> int:
  """Returns the width of the head, 0 where there is none."""
  return params["head/kernel"].shape[-1] if "head/kernel" in params else 0


def describe(model: ModelConfig, base: ModelConfig | None = None) -> str:
  """Returns the flags that make this model, e.g. --config.model.pool=gap.

  Args:
    model: The model to be described.
    base: The model of the config that gets the flags; None: the defaults.
  """
  base, flags = base or model_config(), []
  for field in dataclasses.fields(model):
    value = getattr(model, field.name)
    if field.name == "variant" or value != getattr(
      base, field.name, field.default
    ):
      text = ",".join(map(str, value)) if isinstance(value, tuple) else value
      flags.append(f"--config.model.{field.name}={text}")
  return " ".join(flags)


def _transformer(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of a ViT or a hybrid that its arrays state."""
  missing = [n for n in NEEDED if n not in params]
  if missing:
    raise ValueError(
      f"got parameters of a Transformer without {' and '.join(missing)};"
      " expected a whole model."
    )
  kernel = params["embedding/kernel"].shape
  query, dense = params[_QUERY].shape, params[_DENSE].shape
  if kernel[0] != kernel[1]:
    raise ValueError(
      f"embedding/kernel: got patches of {kernel[0]} x {kernel[1]}, expected"
      " squares."
    )
  depth = len({m[1] for n in params if (m := _BLOCK_NAME.match(n))})
  size = Size(kernel[-1], depth, dense[1], query[1])
  name = next((k for k, v in SIZES.items() if v == size), "B")
  options: dict[str, Any] = {"variant": f"{name}/{kernel[0]}"}
  for field, value in dataclasses.asdict(size).items():
    if value != getattr(SIZES[name], field):
      options[field] = value
  if "conv_root/kernel" in params:
    options |= _hybrid(params, name, kernel[0])

  elif kernel[2] != 3:
    options["channels"] = kernel[2]

  options["pool"] = (
    "token"
    if "cls" in params
    else "map"
    if "MAPHead_0/probe" in params
    else "gap"
  )
  in_block = POS_EMBEDDING.replace("Transformer/", _BLOCK)
  if any(n in params for n in (in_block, in_block + "_x")):
    options["posemb_at"] = "blocks"
  if POS_EMBEDDING in params or in_block in params:
    options["posemb"] = "learn"
  elif POS_EMBEDDING + "_x" in params or in_block + "_x" in params:
    options["posemb"] = "learn2d"
  elif _ATTENTION + "offsets" in params:
    options["posemb"] = "relative"
  else:
    options["posemb"] = "sincos2d"  # as in all published files without a table
  options["pre_logits"] = "pre_logits/kernel" in params
  return options


_BLOCK_NAME = re.compile(r"Transformer/encoderblock_(\d+)/")


def _blocks(names: Iterable[str]) -> tuple[int, ...]:
  """Returns the number of units in each stage, by their names."""
  units: dict[int, set[str]] = {}
  for name in names:
    if m := re.match(r"block(\d+)/unit(\d+)/", name):
      units.setdefault(int(m[1]), set()).add(m[2])
  return tuple(len(units[s]) for s in sorted(units))


def _width(params: Mapping[str, Any]) -> float:
  return params["conv_root/kernel"].shape[-1] / 64


def _hybrid(params: Mapping[str, Any], size: str, patch: int) -> dict[str, Any]:
  blocks, width = _blocks(params), _width(params)
  options: dict[str, Any] = {} if width == 1 else {"stage_width": width}
  if not blocks:
    return options | {"variant": f"R+{size}/{2 * patch}"}
  if patch != 1:
    raise ValueError(
      f"embedding/kernel: got patches of {patch} behind a ResNet of"
      f" {len(blocks)} stages, expected 1."
    )
  for depth, known in RESNETS.items():
    if blocks == known:
      return options | {"variant": f"R{depth}+{size}/32"}
    if blocks == (*known[:2], known[2] + known[3]):
      return options | {"variant": f"R{depth}+{size}/16"}
  return options | {"variant": f"R50+{size}/16", "stage_blocks": blocks}


def _resnet(params: Mapping[str, Any]) -> dict[str, Any]:
  blocks, width = _blocks(params), _width(params)
  name = "bit_v1" if "gn_root/scale" in params else "bit"
  depth = next((d for d, known in RESNETS.items() if known == blocks), None)
  options: dict[str, Any] = {
    "name": name,
    "variant": f"R{depth or 50}x{width:g}",
  }
  if depth is None:
    options["stage_blocks"] = blocks
  return options
