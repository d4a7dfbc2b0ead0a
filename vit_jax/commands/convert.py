"""Writes weights in another format: `vit-jax convert SRC DST --to=FORMAT`."""

import argparse
import os
from collections.abc import Sequence

from vit_jax.config import cli

# The formats of WRITERS.
FORMATS = {
  "orbax": "a checkpoint of vit_jax",
  "npz": "under Google's names",
  "timm": "a .safetensors for timm",
  "meta": "a .pth under Meta's names",
  "openclip": "CLIP's image tower for OpenCLIP",
  "hf": "a folder for transformers",
  "peft": "adapters and head of a run with config.lora",
  "onnx": "the forward pass for onnxruntime and others",
  "stablehlo": "the forward pass for jax on any platform",
}
# The choices of resample.METHODS.
FILTERS = {
  "zoom": "ViT's",
  "bilinear": "FlexiViT's",
  "linear": "transformers' BEiT's",
  "bicubic": "CLIP's",
  "timm": "bicubic; BEiT's on a geometric grid",
  "hf": "DeiT's, MAE's",
  "dinov2": "DINO's",
}
DESCRIPTION = """\
Writes weights in another format, reads the file again and compares logits."""
EXAMPLE = """\
vit-jax convert runs/birds birds.safetensors --to=timm
vit-jax convert B_16.npz hf/b16 --to=hf --image_size=384"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "convert", DESCRIPTION, EXAMPLE, usage="SRC DST --to=FORMAT [options]"
  )
  parser.add_argument(
    "src", metavar="SRC", help="anything that vit_jax.load reads"
  )
  parser.add_argument(
    "dst", metavar="DST", help="a new file, or a new folder (orbax, hf, peft)"
  )
  parser.add_argument(
    "--to",
    required=True,
    choices=FORMATS,
    metavar="FORMAT",
    help=_listed(FORMATS),
  )
  parser.add_argument(
    "--image_size", type=_sides, help="new size in pixels, 384 or 384x512"
  )
  parser.add_argument(
    "--patch", type=cli.positive, help="new size of the patches in pixels"
  )
  parser.add_argument(
    "--posemb_filter",
    choices=FILTERS,
    metavar="FILTER",
    help="resampling of positions (default: the authors', but zoom for FlexiViT"
    f" and timm for BEiT). {_listed(FILTERS)}",
  )
  parser.add_argument(
    "--grid",
    type=_sides,
    help="rows x columns of patches, if SRC does not state it",
  )
  parser.add_argument(
    "--num_heads",
    type=cli.positive,
    help="attention heads, if SRC does not state them",
  )
  parser.add_argument(
    "--cls_row",
    choices=("true", "false"),
    help="whether the class token has a position embedding",
  )
  parser.add_argument(
    "--gelu",
    choices=("tanh", "erf", "quick"),
    help="form of GELU (default: as SRC). tanh: Google's; erf: exact,"
    " PyTorch's; quick: OpenAI's",
  )
  parser.add_argument(
    "--posemb",
    choices=("sincos2d", "none"),
    help="positions if SRC has no table: fixed sines, or none",
  )
  parser.add_argument(
    "--mean",
    help="SRC's normalisation: half, imagenet, clip or MEAN/STD",
  )
  parser.add_argument(
    "--drop_head",
    action="store_true",
    help="leave out the head; for timm also the tanh layer",
  )
  parser.add_argument(
    "--opset",
    type=cli.positive,
    metavar="N",
    help="with --to=onnx: opset version (default: 23)",
  )
  parser.add_argument(
    "--fp16",
    action="store_const",
    const=True,
    help="with --to=onnx: float16 inside, float32 in and out",
  )
  parser.add_argument(
    "--push",
    metavar="OWNER/NAME",
    help="with --to=hf: upload the folder to the hub; a new repository is"
    " private",
  )
  args = parser.parse_args(argv)
  if args.push and args.to != "hf":
    parser.error(f"--push: got --to={args.to}, expected --to=hf.")
  for name in ("opset", "fp16"):
    if getattr(args, name) is not None and args.to != "onnx":
      parser.error(f"--{name}: got --to={args.to}, expected --to=onnx.")
  if args.cls_row is not None:
    args.cls_row = args.cls_row == "true"
  return args


def _listed(choices: dict[str, str]) -> str:
  return "; ".join(f"{name}: {doc}" for name, doc in choices.items())


def _sides(text: str) -> tuple[int, int]:
  """Returns the two numbers of "384x512"; one number stands for a square."""
  sides = text.split("x")
  if len(sides) > 2 or not all(s.isdecimal() and int(s) for s in sides):
    raise argparse.ArgumentTypeError(
      f"got {text!r}, expected a size such as 224 or 224x160 (a grid: 14 or"
      " 14x10)."
    )
  return int(sides[0]), int(sides[-1])


def main(argv: Sequence[str]) -> None:
  """Writes the file, or ends the process with an error."""
  args = parse(argv)
  # The comparison takes two images; a training run may use the accelerators.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from vit_jax.tools.exporting import convert

  convert.main(args)
