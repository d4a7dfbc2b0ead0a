"""Writes weights in another format: `vit-jax convert SRC DST --to=FORMAT`.

SRC is anything that `vit_jax.load` reads. The written file is read again, and
its logits are compared with those of SRC.
"""

import argparse
import os
from collections.abc import Sequence

from vit_jax.config import cli

# The formats of WRITERS.
FORMATS = {
  "orbax": "a checkpoint of ours",
  "npz": "under Google's names",
  "timm": "a .safetensors for timm",
  "hf": "a folder for Hugging Face's transformers",
  "onnx": "the forward pass for onnxruntime and others",
  "stablehlo": "the forward pass for jax alone, on any of its platforms",
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the words after the verb."""

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
  parser = cli.parser(
    "convert",
    "Writes weights in another format, reads the file again and compares"
    " logits.",
    "vit-jax convert runs/birds birds.safetensors --to=timm\n"
    "vit-jax convert B_16.npz hf/b16 --to=hf --image_size=384",
    usage="SRC DST --to=FORMAT [options]",
  )
  parser.add_argument(
    "src", metavar="SRC", help="anything that vit_jax.load reads"
  )
  parser.add_argument(
    "dst", metavar="DST", help="a new file, or a new folder (orbax, hf)"
  )
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
    "--grid", type=sides, help="rows x columns of patches, if SRC states none"
  )
  parser.add_argument("--num_heads", type=int, help="if SRC states none")
  parser.add_argument("--cls_row", type=truth, help="if SRC does not state it")
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
  parser.add_argument(
    "--push",
    metavar="OWNER/NAME",
    help="upload the folder of --to=hf to the hub; a new repository is private",
  )
  args = parser.parse_args(argv)
  if args.push and args.to != "hf":
    parser.error(f"--push: got --to={args.to}, expected --to=hf.")
  return args


def main(argv: Sequence[str]) -> None:
  """Writes the file, or ends the process with an error."""
  args = parse(argv)
  # Two images pass through; a training run may have the accelerators.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from vit_jax.exporting import convert

  convert.main(args)
