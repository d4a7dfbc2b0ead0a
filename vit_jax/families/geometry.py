"""What a model's options come to: sizes, stages, grid of tokens."""

import dataclasses

from vit_jax.config import ModelConfig
from vit_jax.families.names import Size, Stages, parse_variant


def size(model: ModelConfig) -> tuple[Size, int]:
  """Returns a Transformer's sizes and its patch's side, overrides applied.

  Behind a ResNet the patch counts points of the feature map.

  Raises:
    ValueError: The variant is unknown, or a ResNet.
  """
  variant = parse_variant(model.variant)
  if variant.size is None:
    raise ValueError(
      f"got {model.variant!r}, which is a ResNet; expected a Transformer such"
      " as 'B/16', or config.model.name=bit."
    )
  fields = [f.name for f in dataclasses.fields(Size)]
  overrides = {f: getattr(model, f) for f in fields}
  overrides = {f: v for f, v in overrides.items() if v is not None}
  return dataclasses.replace(variant.size, **overrides), variant.patch


def stages(model: ModelConfig) -> Stages | None:
  """Returns the model's ResNet, overrides applied; None where it has none.

  Raises:
    ValueError: The variant is unknown, or no ResNet where the name says so.
  """
  found = parse_variant(model.variant).stages
  if found is None:
    if model.name != "vit":
      raise ValueError(
        f"got {model.variant!r}, expected a ResNet such as 'R50x1' for"
        f" config.model.name={model.name!r}."
      )
    return None
  blocks, width = model.stage_blocks, model.stage_width
  return Stages(
    found.blocks if blocks is None else blocks,
    found.width if width is None else width,
  )


def norms(model: ModelConfig) -> tuple[float, float, str]:
  """Returns gn_eps, ws_eps and ws_eps_on, the family's where they are None."""
  family = (1e-5, 1e-10, "var") if model.name == "bit" else (1e-6, 1e-5, "std")
  given = (model.gn_eps, model.ws_eps, model.ws_eps_on)
  return tuple(
    f if g is None else g for f, g in zip(family, given, strict=True)
  )


def feature_map(
  model: ModelConfig, image_size: tuple[int, int]
) -> tuple[int, int]:
  """Returns rows and columns of what the patches are cut from.

  That is the image, or the map of the ResNet in front, which halves its sides
  in the root twice, and at every stage but the first, rounding up.
  """
  found = stages(model)
  if found is None:
    return image_size
  halvings = 2 + max(0, len(found.blocks) - 1)
  height, width = (-(-side // 2**halvings) for side in image_size)
  return height, width


def patch_grid(
  model: ModelConfig, image_size: tuple[int, int]
) -> tuple[int, int]:
  """Returns rows and columns of tokens in an image of (height, width).

  For a ResNet, those of its last feature map.
  """
  height, width = feature_map(model, image_size)
  patch = size(model)[1] if model.name == "vit" else 1
  return height // patch, width // patch


def has_cls_row(model: ModelConfig) -> bool:
  """Whether the table of positions begins with a row for the class token."""
  return (
    model.name == "vit"
    and model.pool == "token"
    and model.posemb == "learn"
    and model.cls_row
  )
