"""Compares weights with other libraries: the table of docs/weights.md.

Each case is a small model of a library with random weights. It is saved by the
library and loaded here. The outputs of all blocks and the last output are
compared at the trained size, at another size and at a rectangle, for which the
library resizes the positions in its own way. Then the model is written under
the library's names and read back, and must be equal bit for bit. Images are
random.

PYTHONPATH=tests python tests/weights/weights_table.py
PYTHONPATH=tests python tests/weights/weights_table.py --only=DINOv3 --verbose
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from foreign import error

import vit_jax
from vit_jax.tools.exporting import convert

# Families that test_parity.py alone compares.
TESTED = ("hybrids, BiT", "LoRA")
COLUMNS = ("timm", "transformers", "Meta", "OpenCLIP")


class Outputs(NamedTuple):
  """What a model computes of images.

  blocks: Tokens [b, n, d] after each block.
  last: Logits, or features of a model without a head, [b, d].
  """

  blocks: list[np.ndarray]
  last: np.ndarray


class Theirs(NamedTuple):
  """A model of another library.

  save: Writes it to a new folder, and returns what `vit_jax.load` opens; None:
    it cannot be saved.
  outputs: Images [b, h, w, 3] in [-1, 1], of any size -> outputs.
  reload: Returns the library's model of what we wrote; None: not tried.
  as_run: (folder, loaded model) -> a run of ours with the same adapters, which
    alone is written in this library's format.
  """

  save: Callable[[pathlib.Path], pathlib.Path] | None
  outputs: Callable[[np.ndarray], Outputs]
  reload: Callable[[str], "Theirs"] | None = None
  as_run: Callable[[pathlib.Path, Any], pathlib.Path] | None = None


class Case(NamedTuple):
  """A comparison.

  family: Row of the table.
  library: Column of the table, one of `COLUMNS`, or "peft".
  name: Name of the model in the library.
  make: Returns the library's model.
  sizes: (height, width) of the images, the trained ones first.
  filter: How the library resizes positions, of `resample.METHODS`.
  to: Format that it is written in; None: it is not written.
  options: Further arguments of `vit_jax.load`.
  written: The same for what we wrote.
  """

  family: str
  library: str
  name: str
  make: Callable[[], Theirs]
  sizes: tuple[tuple[int, int], ...]
  filter: str
  to: str | None
  options: dict[str, Any] = {}
  written: dict[str, Any] = {}


def compare(case: Case, folder: pathlib.Path) -> dict[str, float]:
  """Returns the largest error of a block and of the last output, by size.

  Raises:
    AssertionError: What is written and read back is not the same.
  """
  theirs, errors = case.make(), {}
  path = theirs.save(folder)
  vit = None
  for size in case.sizes:
    images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3))
    images = images.astype(np.float32)
    loaded = vit_jax.load(
      path,
      image_size=size,
      posemb_filter=case.filter,
      verbose=False,
      **case.options,
    )
    vit = vit or loaded
    errors[f"{size[0]}x{size[1]}"] = difference(
      loaded, images, theirs.outputs(images)
    )
  if case.to:
    errors["written"] = write(case, vit, theirs, folder)
  return errors


def difference(vit, images: np.ndarray, expected: Outputs) -> float:
  """Returns the largest error of any block and of the last output."""
  with jax.default_matmul_precision("highest"):
    logits, out = vit(images)
  blocks = [
    np.asarray(out[f"encoderblock_{i}"]["after_mlp"])
    for i in range(len(expected.blocks))
  ]
  assert f"encoderblock_{len(blocks)}" not in out
  pairs = [*zip(blocks, expected.blocks, strict=True)]
  pairs.append((np.asarray(logits), expected.last))
  return max(error(a, b) for a, b in pairs)


def write(case: Case, vit, theirs: Theirs, folder: pathlib.Path) -> float:
  """Writes and reads back; returns the library's error with what we wrote."""
  if theirs.as_run:
    vit = vit_jax.load(theirs.as_run(folder, vit), verbose=False)
  path = str(folder / "written") + (convert.WRITERS[case.to].suffix or "")
  convert.convert(vit, path, case.to)
  again = vit_jax.load(path, verbose=False, **case.written)
  config = vit.config
  if getattr(config, "posemb", "") == "none":  # a row of no table
    config = dataclasses.replace(config, cls_row=again.config.cls_row)
  assert again.config == config, (again.config, config)
  first, second = (flatten_dict(v.params, sep="/") for v in (vit, again))
  assert first.keys() == second.keys()
  for name, array in first.items():
    np.testing.assert_array_equal(array, second[name], name)
  if theirs.reload is None:
    return 0.0
  size = vit.image_size
  images = np.random.default_rng(2).uniform(-1, 1, (2, *size, 3))
  images = images.astype(np.float32)
  return difference(vit, images, theirs.reload(path).outputs(images))


def cases() -> list[Case]:
  """Returns all cases; a library is imported where its model is made."""
  import weights_cases_hf
  import weights_cases_meta
  import weights_cases_peft
  import weights_cases_timm

  modules = (
    weights_cases_timm,
    weights_cases_meta,
    weights_cases_hf,
    weights_cases_peft,
  )
  return [case for module in modules for case in module.cases()]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default="", help="part of a family's name")
  parser.add_argument("--verbose", action="store_true")
  args = parser.parse_args()
  cells: dict[str, dict[str, list[tuple[float, bool]]]] = {}
  for case in cases():
    if args.only not in f"{case.family} {case.library} {case.name}":
      continue
    if case.family in TESTED:
      continue
    with tempfile.TemporaryDirectory() as folder:
      errors = compare(case, pathlib.Path(folder))
    if args.verbose:
      text = ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
      print(case.library, case.name, text, file=sys.stderr)
    row = cells.setdefault(case.family, {})
    row.setdefault(case.library, []).append(
      (max(errors.values()), case.to is not None)
    )
  print(f"| family | {' | '.join(COLUMNS)} |")
  print("|---" * (1 + len(COLUMNS)) + "|")
  for family, row in cells.items():
    texts = []
    for column in COLUMNS:
      errors = row.get(column, [])
      ways = "in, out" if errors and all(out for _, out in errors) else "in"
      worst = max((e for e, _ in errors), default=0)
      texts.append(f"{ways}: {worst:.0e}" if errors else "")
    print(f"| {family} | {' | '.join(texts)} |")


if __name__ == "__main__":
  main()
