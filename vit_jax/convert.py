"""Writes weights in another format: `vit-jax convert SRC DST --to=FORMAT`.

SRC is anything that `vit_jax.load` reads. The written file is read again, and
its logits are compared with those of SRC.
"""

import argparse

from vit_jax.config import commands

# The formats of WRITERS.
FORMATS = {
  "orbax": "a checkpoint of ours",
  "npz": "under Google's names",
  "timm": "a .safetensors for timm",
  "hf": "a folder for Hugging Face's transformers",
}
# The choices of resample.METHODS.
FILTERS = {
  "zoom": "the ViT paper's (default)",
  "bilinear": "FlexiViT's",
  "bicubic": "timm's",
  "timm": "the same",
  "hf": "Hugging Face's",
}
GELUS = {"tanh": "approximate, Google's", "erf": "exact, PyTorch's"}
POSITIONS = {"sincos2d": "fixed sines and cosines", "none": "nothing"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line; imports nothing heavy."""

  def sides(text: str):
    values = tuple(int(v) for v in text.lower().split("x"))
    if len(values) > 2 or min(values) < 1:
      raise ValueError
    return values if len(values) == 2 else values * 2

  def truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
      raise ValueError
    return text.lower() == "true"

  def listed(choices: dict[str, str]) -> str:
    return "; ".join(f"{name}: {doc}" for name, doc in choices.items())

  sides.__name__, truth.__name__ = "size (224 or 224x160)", "true or false"
  parser = commands.parser(
    "convert",
    "Writes weights in another format, reads the file again and compares"
    " logits.",
    "vit-jax convert runs/birds birds.safetensors --to=timm\n"
    "vit-jax convert B_16.npz hf/b16 --to=hf --image_size=384",
  )
  parser.add_argument("src", help="anything that vit_jax.load reads")
  parser.add_argument("dst", help="a new file (npz, timm) or folder")
  parser.add_argument(
    "--to",
    required=True,
    choices=FORMATS,
    help=listed(FORMATS),
  )
  parser.add_argument(
    "--image_size", type=sides, help="pixels, 384 or 384x512; resamples"
  )
  parser.add_argument("--patch", type=int, help="pixels; resizes the embedding")
  parser.add_argument(
    "--posemb_filter", default="zoom", choices=FILTERS, help=listed(FILTERS)
  )
  parser.add_argument(
    "--grid", type=sides, help="rows x columns of patches, if SRC cannot say"
  )
  parser.add_argument("--num_heads", type=int, help="if SRC cannot say")
  parser.add_argument("--cls_row", type=truth, help="if SRC cannot say")
  parser.add_argument(
    "--gelu", choices=GELUS, help="if not SRC's. " + listed(GELUS)
  )
  parser.add_argument(
    "--posemb", choices=POSITIONS, help="if no table. " + listed(POSITIONS)
  )
  parser.add_argument(
    "--drop_head",
    action="store_true",
    help="leave out the head; for timm, a tanh layer before it as well",
  )
  return parser.parse_args(argv)


if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  parse()

# ruff: noqa: E402
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax import checkpoint, weights
from vit_jax.pretrained import Pretrained
from vit_jax.weights import bit, google, hf, labels, safetensors_file, timm
from vit_jax.weights.found import METADATA_KEY
from vit_jax.weights.identify import NEEDED


def convert(vit: Pretrained, path: str, to: str) -> list[str]:
  """Writes a model.

  Args:
    vit: A model from `vit_jax.load`.
    path: A file for "npz" and "timm", a new folder for "orbax" and "hf".
    to: A name of `WRITERS`.

  Returns:
    Notes for the user: how to load it there, and what differs there.

  Raises:
    FileExistsError: The path exists.
    ValueError: The format has no place for a part of the model.
  """
  target = epath.Path(path)
  if target.exists():
    raise FileExistsError(
      f"DST: got {path!r}, which exists; expected a new one."
    )
  write, suffix = WRITERS[to]
  if suffix and target.suffix != suffix:
    raise ValueError(f"DST: got {path!r}, expected a name ending in {suffix}.")
  params = {
    k: np.asarray(v) for k, v in flatten_dict(vit.params, sep="/").items()
  }
  return write(vit, params, target)


def _write_orbax(vit: Pretrained, params, target: epath.Path) -> list[str]:
  del params  # the tree itself is written
  checkpoint.write_params(str(target), vit.params, vit.metadata())
  return [
    f"vit_jax.load({str(target)!r}), --config.init={target}, or Orbax alone:"
    " see docs/weights.md"
  ]


def _write_npz(vit: Pretrained, params, target: epath.Path) -> list[str]:
  config = vit.config
  if (at := getattr(config, "posemb_at", "stem")) != "stem":
    raise ValueError(
      f"config.model.posemb_at: got {at!r}, expected 'stem': the codes that"
      " read Google's names add positions once. Write a checkpoint of ours:"
      " --to=orbax."
    )
  if bit.holds(config):
    arrays, reader = bit.write(params), "BiT's own code, big_vision and timm"
  else:
    is_big_vision = google.is_big_vision(config, params)
    arrays = google.write(params, is_big_vision=is_big_vision)
    reader = "big_vision" if is_big_vision else "vision_transformer and timm"
  target.parent.mkdir(parents=True, exist_ok=True)
  with target.open("wb") as stream:
    np.savez(stream, **arrays)
  notes = [f"under the names that {reader} read"]
  if untold := _untold(vit):
    text = ", ".join(f"{k}={v!r}" for k, v in untold.items())
    notes.append(
      f"load it with {text}: .npz has no place to say so, and Google's codes do"
      " otherwise"
    )
  return notes


def _write_timm(vit: Pretrained, params, target: epath.Path) -> list[str]:
  grid = vit.config.grid(vit.image_size)
  arrays = timm.write(params, vit.config, grid=grid)
  target.parent.mkdir(parents=True, exist_ok=True)
  metadata = vit.metadata()
  safetensors_file.write(target, arrays, {METADATA_KEY: metadata})
  name, kwargs = timm.create_call(vit.config, vit.num_classes, vit.image_size)
  call = "timm has no name for this model; the arrays have the names of its own"
  if name is not None:
    text = "".join(f", {k}={v!r}" for k, v in kwargs.items())
    call = f"timm.create_model({name!r}, checkpoint_path={str(target)!r}{text})"
  return [call, *timm.differences(vit.config)]


def _write_hf(vit: Pretrained, params, target: epath.Path) -> list[str]:
  arrays, config, preprocessor = hf.write(
    params,
    vit.config,
    num_classes=vit.num_classes,
    image_size=vit.image_size,
    class_names=vit.class_names,
    grid=vit.config.grid(vit.image_size),
    loss=vit.loss,
  )
  target.mkdir(parents=True)
  safetensors_file.write(target / "model.safetensors", arrays, {})
  for name, values in (
    ("config.json", config),
    ("preprocessor_config.json", preprocessor),
  ):
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (target / name).write_text(text + "\n")
  (kind,) = config["architectures"]
  return [f"transformers.{kind}.from_pretrained({str(target)!r})"]


class Writer(NamedTuple):
  """What writes a format.

  write: (model, flat parameters, path) -> notes for the user.
  suffix: Ending of the file's name; None: it is a folder.
  """

  write: Callable[[Pretrained, dict[str, np.ndarray], epath.Path], list[str]]
  suffix: str | None = None


WRITERS = {
  "orbax": Writer(_write_orbax),
  "npz": Writer(_write_npz, ".npz"),
  "timm": Writer(_write_timm, ".safetensors"),
  "hf": Writer(_write_hf),
}


def without_head(vit: Pretrained, to: str) -> Pretrained:
  """Removes the head, and, for timm, the tanh layer before it."""
  dropped = ("head", "pre_logits") if to == "timm" else ("head",)
  config = vit.config
  if to == "timm" and getattr(config, "pre_logits", False):
    config = dataclasses.replace(config, pre_logits=False)
  return dataclasses.replace(
    vit,
    config=config,
    params={k: v for k, v in vit.params.items() if k not in dropped},
    num_classes=0,
    class_names=None,
  )


def largest_difference(
  one: Pretrained, other: Pretrained
) -> tuple[str, float, float]:
  """Compares two models on the same random images.

  Returns:
    The layer compared ("logits", or "pre_logits" if there is no head); the
    largest difference; and the largest absolute value.
  """
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (2, *one.image_size, 3)).astype(np.float32)
  layer = "logits" if one.num_classes else "pre_logits"
  with jax.default_matmul_precision("highest"):
    a, b = (np.asarray(v(images)[1][layer]) for v in (one, other))
  return layer, float(np.abs(a - b).max()), float(np.abs(a).max())


def main(argv: list[str] | None = None) -> None:
  """Loads, writes, reads again, and prints a report of each."""
  args = parse(argv)
  given = {
    "num_heads": args.num_heads,
    "cls_row": args.cls_row,
    "gelu": args.gelu,
    "posemb": args.posemb,
  }
  options = {k: v for k, v in given.items() if v is not None}
  try:
    vit = vit_jax.load(
      args.src,
      image_size=args.image_size,
      patch=args.patch,
      grid=args.grid,
      posemb_filter=args.posemb_filter,
      **options,
    )
    print(f"{'model':<16}{weights.describe(vit.config)}")
    size = "x".join(map(str, vit.image_size))
    print(f"{'images':<16}{size}, {vit.ops}")
    if args.drop_head:
      vit = without_head(vit, args.to)
    notes = convert(vit, args.dst, args.to)
    # A file states less than is known here; the rest is passed on.
    told = _untold(vit) if args.to == "npz" else {}
    layer, difference, largest = largest_difference(
      vit,
      vit_jax.load(args.dst, image_size=vit.image_size, verbose=False, **told),
    )
  except (FileNotFoundError, FileExistsError, ValueError) as e:
    sys.exit(str(e))
  print(f"{'written':<16}{args.dst}")
  for note in notes:
    print(f"{'':<16}{note}")
  print(
    f"{'read again':<16}largest difference of {layer} {difference:.2g}, of"
    f" {largest:.3g}"
  )


def _untold(vit: Pretrained) -> dict:
  """Returns arguments of `vit_jax.load` for a .npz, which has only arrays."""
  params = flatten_dict(vit.params, sep="/")
  by_names = weights.identify(params, {})
  keys = "gelu ln_eps gn_eps ws_eps ws_eps_on root_pad posemb".split()
  untold = {k: getattr(vit.config, k) for k in keys if hasattr(vit.config, k)}
  untold = {k: v for k, v in untold.items() if v != getattr(by_names, k)}
  if google.POS_EMBEDDING in params:
    rows, columns = vit.config.grid(vit.image_size)
    untold |= {"grid": (rows, columns)} if rows != columns else {}
  guess = labels.loss(vit.num_classes, NEEDED[0] in params) or "softmax"
  untold |= {"loss": vit.loss} if vit.num_classes and vit.loss != guess else {}
  return untold


if __name__ == "__main__":
  main()
