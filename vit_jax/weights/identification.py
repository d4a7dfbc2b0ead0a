"""Finds the model of a set of parameters by names and shapes alone."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vit_jax.config import ConfigError, ModelConfig, model_from_dict
from vit_jax.families import FAMILIES, model_config
from vit_jax.families.resnet import RESNETS
from vit_jax.families.vit import SIZES, Size, ViTConfig
from vit_jax.options import shown
from vit_jax.weights.weights_file import POS_EMBEDDING, shorten

_BLOCK = f"{ViTConfig.BLOCKS.format(0)}/"
_ATTENTION = _BLOCK + "MultiHeadDotProductAttention_0/"
_QUERY = _ATTENTION + "query/kernel"
_MLP = _BLOCK + "MlpBlock_0/"
_DENSE = _MLP + "Dense_0/kernel"
# The arrays of a Transformer that state its size -> number of dimensions.
NEEDED = {_QUERY: 3, _DENSE: 2}
# Families that `identify` recognises; files of other families must contain
# metadata with `name`.
RECOGNISED = ("vit", "modern", "bit", "bit_v1")
# Every model of the family `modern` whose file does not name the family has one
# of these parameters.
PARTS = (
  "registers",
  "dist",
  "projection/kernel",
  "pooled_norm/scale",
  "Transformer/pre_norm/scale",
  _BLOCK + "LayerScale_0/scale",
  _ATTENTION + "relative_bias",
  _MLP + "Gate/kernel",
  _MLP + "LayerNorm_0/scale",
)


def identify(
  params: Mapping[str, Any], options: Mapping[str, Any]
) -> ModelConfig:
  """Returns the model of these parameters.

  Args:
    params: Our flat names -> anything with a shape; blocks not stacked.
    options: Options of the model from other sources; they have precedence.

  Raises:
    ValueError: The parameters fit no model of vit_jax.
  """
  names = set(params)
  if options.get("name", "vit") not in RECOGNISED:
    return _config(options)
  if "embedding/kernel" in names:
    is_modern = options.get("name") == "modern" or has_modern_parts(params)
    sizes = FAMILIES["modern"].SIZES if is_modern else SIZES
    inferred = _transformer(params, sizes)
    if is_modern:
      inferred |= _parts(params)
  elif "conv_root/kernel" in names and _blocks(names):
    inferred = _resnet(params)
  else:
    some = shorten(sorted(names)) or "none"
    raise ValueError(f"got {some}, expected parameters of a ViT or BiT ResNet.")
  own = _config({"name": "vit", **inferred})
  if (name := options.get("name", own.name)) != own.name:
    raise ValueError(f"name: got {name!r}, expected {own.name!r} by arrays.")
  model = _config({"name": "vit", **inferred, **options})
  if errors := _contradictions(model, own) or list(model.errors()):
    raise ValueError(" ".join(errors))
  return model


def _contradictions(model: ModelConfig, own: ModelConfig) -> list[str]:
  """Returns where stated options contradict the arrays.

  Args:
    model: The model by options and arrays.
    own: The model by the arrays alone.
  """
  pairs = {"stage_blocks": [m.stages and m.stages.blocks for m in (model, own)]}
  if isinstance(model, ViTConfig):
    pairs["depth"] = [m.size.depth for m in (model, own)]
  return [
    f"{key}: got {shown(stated)}, expected {shown(has)} by the arrays."
    for key, (stated, has) in pairs.items()
    if stated != has
  ]


def _config(options: Mapping[str, Any]) -> ModelConfig:
  """Returns the model with these options.

  Raises:
    ValueError: Some are not options of this family.
  """
  try:
    return model_from_dict(dict(options))
  except ConfigError as e:
    raise ValueError(" ".join(e.errors)) from None


def stated_model(options: Mapping[str, Any]) -> ModelConfig:
  """Returns a model whose family declares the names of a file's parameters.

  Without a stated family it is "vit". A model of `RECOGNISED` has the defaults
  of its family, because its arrays decide its options; another one has the
  options.

  Raises:
    ValueError: The family is unknown, or has other options.
  """
  name = options.get("name", "vit")
  return _config({"name": name} if name in RECOGNISED else options)


def num_classes(
  params: Mapping[str, Any], model: ModelConfig | type[ModelConfig]
) -> int:
  """Returns the width of the head, 0 without a head."""
  heads = (a.shape for k, a in sorted(params.items()) if model.is_head(k))
  return next((shape[-1] for shape in heads if shape), 0)


def has_modern_parts(names: Collection[str]) -> bool:
  """Whether one of these parameters requires the family `modern`."""
  return any(part in names for part in PARTS)


def describe(model: ModelConfig, base: ModelConfig | None = None) -> str:
  """Returns the flags for this model, such as --config.model.pool=gap.

  Args:
    model: The model to describe.
    base: The model of the config that gets the flags; None for the defaults.
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


def _transformer(
  params: Mapping[str, Any], sizes: Mapping[str, Size]
) -> dict[str, Any]:
  """Returns the options of a ViT or a hybrid that its arrays show.

  Args:
    params: As for `identify`.
    sizes: The sizes that have a name.
  """
  missing = [n for n in NEEDED if n not in params]
  if missing:
    raise ValueError(f"got a Transformer without {' and '.join(missing)}.")
  kernel = params["embedding/kernel"].shape
  query, dense = params[_QUERY].shape, params[_DENSE].shape
  if kernel[0] != kernel[1]:
    raise ValueError(f"embedding/kernel: got {kernel}, expected squares.")
  depth = len({*map(ViTConfig.block_of, params)} - {None})
  size = Size(kernel[-1], depth, dense[1], query[1])
  name = next((k for k, v in sizes.items() if v == size), "B")
  options: dict[str, Any] = {"variant": f"{name}/{kernel[0]}"}
  for field, value in dataclasses.asdict(size).items():
    if value != getattr(sizes[name], field):
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


def _parts(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of the family `modern` that arrays show.

  Where the arrays leave a choice, the result is that of most published files:
  without a table, positions are DINOv3's rotations; a pooled vector with a norm
  of its own is a mean; only CLIP's patches have no bias; LayerScale, if trained
  anew, starts at DINOv2's 1e-5.
  """
  pooled, query = "pooled_norm/scale" in params, _ATTENTION + "query/bias"
  has_cls, pre_norm = "cls" in params, "Transformer/pre_norm/scale" in params
  options: dict[str, Any] = {
    "name": "modern",
    "class_token": has_cls,
    "distilled": "dist" in params,
    "patch_bias": "embedding/bias" in params or not pre_norm,
    "pre_norm": pre_norm,
    "final_norm": "pooled" if pooled else "tokens",
    "mlp_norm": _MLP + "LayerNorm_0/scale" in params,
    "qkv_bias": (
      "all"
      if _ATTENTION + "key/bias" in params
      else "no_key"
      if query in params
      else "none"
    ),
  }
  if "registers" in params:
    options["registers"] = params["registers"].shape[1]
  if "projection/kernel" in params:
    options["projection"] = params["projection/kernel"].shape[1]
  if _BLOCK + "LayerScale_0/scale" in params:
    options["layer_scale"] = 1e-5
  if _MLP + "Gate/kernel" in params:
    options["mlp"] = "swiglu"
  if _ATTENTION + "relative_bias" in params:
    options["posemb"] = "relative_bias"
  elif not any("/posembed_input/" in name for name in params):
    options |= {"posemb": "none", "rope": "dinov3"}
  if "MAPHead_0/probe" in params:
    options["pool"] = "map"
  elif has_cls and pooled:
    options["pool"] = "gap"
  elif has_cls and "projection/kernel" not in params:
    head, width = params.get("head/kernel"), params[_QUERY].shape[0]
    if head is not None and head.shape[0] == 2 * width:
      options["pool"] = "token_gap"
  return options


def _blocks(names: Iterable[str]) -> tuple[int, ...]:
  """Returns the number of units in each stage, from their names."""
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
    raise ValueError(f"embedding/kernel: got patch {patch}, expected 1.")
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
