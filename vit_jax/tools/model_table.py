"""The table of all published models, without jax: `vit-jax models`."""

from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.families import ModelConfig, by_variant, published
from vit_jax.tools.scoring import published_scores
from vit_jax.zoo.families.later import LATER


class Cells(NamedTuple):
  """The cells of one set of weights.

  model: Series and variant.
  pixels: Side of the images.
  parameters: In millions, without a classifier.
  gflops: Of the forward pass of one image, without a classifier, two per
    multiply-add.
  classes: Outputs of the classifier; "" without one.
  top1: Published top-1 accuracy on ImageNet, percent, of the file's classifier;
    or "82.1 linear" or "79.1 zero-shot".
  knn: The same of the nearest neighbours of its features.
  licence: As timm states it; "" if it does not.
  files: Addresses of the files.
  """

  model: str
  pixels: str
  parameters: str
  gflops: str
  classes: str
  top1: str
  knn: str
  licence: str
  files: tuple[str, ...]


NAMES = Cells(
  *("model", "pixels", "million", "GFLOPs", "classes", "top-1", "k-NN"),
  "licence",
  ("file",),
)
# Below the table, in the command and on the page.
LEGEND = """\
million: parameters without a classifier. GFLOPs: forward pass of one image, two
per multiply-add. top-1, k-NN: published accuracy on ImageNet in percent; none
was measured here. An empty cell is not known. The file is what vit_jax.load,
--config.init and vit-jax convert take; `*` and a pytorch_model.bin have to be
replaced by the path of a file. Every other size and patch can be trained, too:
--config.model.variant=S/8."""


def model_of(row: published.Row) -> ModelConfig:
  """Returns the model of a row of the list."""
  if row.series in LATER:
    return LATER[row.series].model(row.variant)
  return by_variant(row.variant)


def cells(row: published.Row) -> Cells:
  """Returns the cells of a row of the list."""
  macs = model_of(row).forward_macs((row.pixels,) * 2, 0)
  addresses = tuple(
    a.partition(" (")[0] for f in row.files for a in published.addresses(f)
  )
  top1 = ""
  if row.classes == published_scores.CLASSES:
    score = published_scores.top1(addresses, row.pixels)
    top1 = "" if score is None else f"{score:.2f}"
  for kind, score in (("linear", row.linear), ("zero-shot", row.zero_shot)):
    if score is not None:
      top1 = f"{score:.1f} {kind}"
  return Cells(
    f"{row.series} {row.variant}",
    str(row.pixels),
    f"{row.parameters / 1e6:,.1f}",
    f"{2 * macs / 1e9:,.1f}",
    f"{row.classes:,}" if row.classes else "",
    top1,
    "" if row.knn is None else f"{row.knn:.1f}",
    row.licence,
    addresses,
  )


def table() -> list[Cells]:
  """Returns the cells of all rows."""
  return [cells(row) for row in published.rows()]


def lines() -> Iterator[str]:
  """Yields the lines of the printed table, one for each file."""
  every = [NAMES, *table()]
  columns = zip(*(row[:-1] for row in every), strict=True)
  widths = [max(map(len, column)) for column in columns]
  for row in every:
    first, *numbers = row[:-2]
    texts = [
      first.ljust(widths[0]),
      *(x.rjust(w) for x, w in zip(numbers, widths[1:], strict=False)),
      row.licence.ljust(widths[-1]),
    ]
    start = "  ".join(texts)
    for k, file in enumerate(row.files or ("",)):
      yield f"{start if k == 0 else ' ' * len(start)}  {file}".rstrip()


def main() -> None:
  """Prints the table."""
  print("\n".join(lines()))
  print(f"\n{LEGEND}")
