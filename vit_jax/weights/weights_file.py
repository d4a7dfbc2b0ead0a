"""What was found in a file of weights, and what we write beside our own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.config import json_file, model_from_dict
from vit_jax.losses import PROBABILITIES
from vit_jax.options import shown
from vit_jax.weights.google import POS_EMBEDDING
from vit_jax.weights.lazy import LazyArray

EXPECTED = (
  "expected a .npz of Google's (ViT, AugReg, BiT, big_vision), a .safetensors"
  " of timm, the folder of a Hugging Face model, or the folder of one of our"
  " runs, of its checkpoints or of one step"
)
METADATA_KEY = "vit_jax"  # in the header of .safetensors files that we write
# What `with_metadata` reads; see `json_file.faults`.
METADATA = {
  "model": dict,
  "config": {"model": dict},
  "class_names": [str],
  "image_size": json_file.SIZE,
  "grid": json_file.SIZE,
  "preprocessing": {"ops": str},
  "loss": str,
}


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters under our names, and what the file states about them.

  Attributes:
    path: The file or folder.
    format: "google", "bit", "timm", "hf" or "checkpoint".
    params: Flat, "a/b/c" -> array, unread; blocks not stacked.
    options: Options of the model (fields of its family) that the file or its
      format states, beyond what names and shapes do.
    grid: The (rows, columns) of patches of the position table, or None where
      they are unknown.
    has_cls_row: Whether row 0 of that table is the class token's.
    image_size: (height, width) in pixels, or None where it is unknown.
    class_names: Names in the order of the logits, or None.
    ops: Preprocessing, as `config.data.ops`, or None where it is unknown.
    crop_share: Side of its crop by the shorter side of the image, unrounded, or
      None where it is unknown.
    loss: Loss of the head's training, as `config.objective.loss`; None:
      unknown.
    notes: Facts that a user should know.
    metadata: Everything else that a checkpoint states.
  """

  path: str
  format: str
  params: dict[str, LazyArray]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  grid: tuple[int, int] | None = None
  has_cls_row: bool = False
  image_size: tuple[int, int] | None = None
  class_names: tuple[str, ...] | None = None
  ops: str | None = None
  crop_share: float | None = None
  loss: str | None = None
  notes: tuple[str, ...] = ()
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


def model_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
  config = metadata.get("config")  # another program's may be of any type
  named = config.get("model") if isinstance(config, dict) else None
  return metadata.get("model") or named


def with_metadata(found: Weights, metadata: Mapping[str, Any]) -> Weights:
  """Adds what we wrote beside the parameters.

  Raises:
    ValueError: It is damaged: all that is of another type.
  """
  json_file.check(metadata, METADATA, f"{found.path}: metadata")
  names = metadata.get("class_names")
  size = metadata.get("image_size")
  options = dataclasses.asdict(model_from_dict(model_of(metadata)))
  notes = found.notes
  if (
    POS_EMBEDDING in found.params and options.get("posemb", "learn") != "learn"
  ):
    # timm has no fixed positions: they are written as a learned table.
    notes += (
      f"positions were config.model.posemb={options['posemb']}; in this format"
      " they are a learned table of the same values.",
    )
    options |= {"posemb": "learn", "cls_row": False}
  return dataclasses.replace(
    found,
    options=options,
    grid=tuple(metadata["grid"]) if metadata.get("grid") else None,
    image_size=tuple(size) if size else None,
    class_names=tuple(names) if names else None,
    ops=(metadata.get("preprocessing") or {}).get("ops"),
    loss=_loss_of(metadata),
    notes=notes,
  )


def _loss_of(metadata: Mapping[str, Any]) -> str | None:
  """Returns the loss that is stated, or that the config of a run names."""
  objective = (metadata.get("config") or {}).get("objective")
  named = objective.get("loss") if isinstance(objective, dict) else None
  loss = metadata.get("loss") or named
  if loss is not None and loss not in PROBABILITIES:
    raise ValueError(
      f"metadata: loss: got {shown(loss)}, expected one of"
      f" {', '.join(PROBABILITIES)}."
    )
  return loss


def unknown_names(path, arrays) -> str:
  some = ", ".join(sorted(arrays)[:4]) or "none"
  return (
    f"got {str(path)!r} with {len(arrays)} arrays, such as {some}, of no model"
    f" that we know; {EXPECTED}."
  )
