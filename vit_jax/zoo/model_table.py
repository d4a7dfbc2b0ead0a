"""Prints every model by name: `vit-jax models`."""

import jax

from vit_jax.families import PUBLISHED, by_variant
from vit_jax.models import build
from vit_jax.zoo.families.later import LATER, Later

NUM_CLASSES = 1000
SIDES = (224, 384)


def shapes(name: str, side: int = 224):
  """Returns the shapes of the parameters, with a head of `NUM_CLASSES`.

  Args:
    name: A key of `PUBLISHED`.
    side: Side of the images, pixels, which decides the length of the position
      embedding.
  """
  # With a scan only one block is traced; the number of parameters is the same.
  config = by_variant(name)
  images = jax.ShapeDtypeStruct((1, side, side, 3), "float32")
  model = build(config.stacked() or config, NUM_CLASSES)
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


def count(params) -> int:
  """Returns the number of parameters of a tree of arrays or shapes."""
  return sum(x.size for x in jax.tree.leaves(params))


def row(name: str) -> tuple[str, ...]:
  """Returns the cells of one model."""
  model = by_variant(name)
  macs = [model.forward_macs((s, s), NUM_CLASSES) for s in SIDES]
  return (
    name,
    f"{count(shapes(name)):,}",
    *(f"{2 * m / 1e9:,.1f}" for m in macs),
    *(str(model.num_tokens((s, s)) or "-") for s in SIDES),
  )


def later_row(family: str, later: Later, variant: str) -> tuple[str, ...]:
  """Returns the cells of a later model, without a head."""
  model = later.model(variant)
  side = later.side // model.patch * model.patch
  images = jax.ShapeDtypeStruct((1, side, side, 3), "float32")
  init = build(model.stacked(), 0).init
  params = jax.eval_shape(init, jax.random.key(0), images)["params"]
  macs = model.forward_macs((side, side), 0)
  return (
    f"{family} {variant}",
    f"{count(params):,}",
    str(side),
    f"{2 * macs / 1e9:,.1f}",
    str(model.num_tokens((side, side))),
  )


def print_lines(
  head: tuple[str, ...], rows: dict[tuple[str, ...], tuple[str, ...]]
) -> None:
  """Prints one line per published file of each model.

  Args:
    head: Names of the columns.
    rows: Cells of a model -> its published files.
  """
  cells = {head: ("published files",), **rows}
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  for line, files in cells.items():
    first, *others = (
      text.ljust(w) if k == 0 else text.rjust(w)
      for k, (text, w) in enumerate(zip(line, widths, strict=True))
    )
    start = "  ".join([first, *others])
    for k, file in enumerate(files or ("-",)):
      print(f"{start if k == 0 else ' ' * len(start)}  {file}".rstrip())


def main() -> None:
  """Prints a table of the paper's models, and a table of later models."""
  print_lines(
    ("model", "parameters", "GFLOPs 224", "at 384", "tokens 224", "at 384"),
    {row(name): files for name, files in PUBLISHED.items()},
  )
  print(
    "\nThe parameters are those at 224 px, with a class token, a learned"
    " position\nembedding and 1,000 classes (R...x...: BiT's ResNets). The"
    " FLOPs are those of the\nforward pass of one image, two per multiply-add."
    " With a patch of 14, 384 px means\n378 px. Every other size and patch"
    " works, too: --config.model.variant=S/8.\n"
  )
  print_lines(
    ("later model", "parameters", "pixels", "GFLOPs", "tokens"),
    {
      later_row(family, later, variant): files
      for family, later in LATER.items()
      for variant, files in later.files.items()
    },
  )
  licences = dict.fromkeys(later.licence for later in LATER.values())
  print(
    "\nThe parameters are those without a head. The parts of these models are"
    " options of\n--config.model.name=modern; loading a file of weights sets"
    " them. S/16 of DINOv3\nSwiGLU is S+.",
    *filter(None, licences),
    sep="\n",
  )
