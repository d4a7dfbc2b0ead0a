"""Which files of a source are in which split."""

import fnmatch
import glob
import itertools
import os
import re

from vit_jax.finetune.data.imports.listing import SPLIT_OF, SPLITS, Options
from vit_jax.options import unexpected
from vit_jax.paths import is_by_program, walk


def by_split(
  path: str, suffixes: tuple[str, ...], options: Options, prefix: str
) -> dict[str, list[str]]:
  """Returns the files of each split, in the order of their names.

  A file is in the split whose name is a word of its own name, or of the nearest
  folder with one ("data/train-00000-of-00004.parquet", "val/07.tar"). If no
  file has such a name, all are `train`. Patterns in --splits take precedence.

  Args:
    path: A folder, searched with its sub-folders; a file; or a glob.
    suffixes: How names of files end.
    options: Options of the user.
    prefix: The kind of source, for messages.

  Raises:
    ValueError: No files; files without a split in their names beside others
      with one; a pattern that matches none, or two that match the same file.
  """
  path = os.path.expanduser(path)
  files, root = _files(path, suffixes, prefix)
  if any(options.splits.values()):
    return _by_pattern(files, root, options)
  by_name: dict[str | None, list[str]] = {}
  for file in files:
    split = split_of(os.path.relpath(file, root))
    by_name.setdefault(split, []).append(file)
  if [*by_name] == [None] and len(options.splits) < 2:
    return {next(iter(options.splits), "train"): files}
  named = {k: by_name[k] for k in SPLITS if k in by_name}
  if None in by_name or not {*options.splits} <= {*named}:
    rest = by_name.get(None, [])
    got = ", ".join(options.splits) or "no patterns"
    got += f", and {len(rest)} files of no split {rest[:1]} in {path}"
    expected = (
      f"splits of names ({', '.join(named) or 'none'}), or patterns, such as"
      f" train=0*{suffixes[0]},test=1*{suffixes[0]}"
    )
    raise ValueError(unexpected("--splits", got, expected))
  return {k: v for k, v in named.items() if k in (options.splits or named)}


def _by_pattern(
  files: list[str], root: str, options: Options
) -> dict[str, list[str]]:
  """Returns the files of each split that fit its pattern in --splits."""

  def fits(file: str, pattern: str | None) -> bool:
    names = os.path.relpath(file, root), os.path.basename(file)
    return any(fnmatch.fnmatch(name, pattern or "") for name in names)

  by_name = {
    split: [file for file in files if fits(file, pattern)]
    for split, pattern in options.splits.items()
  }
  chosen = list(itertools.chain(*by_name.values()))
  if not all(by_name.values()) or len({*chosen}) < len(chosen):
    got = ", ".join(
      f"{split}={options.splits[split]} ({len(found)} files)"
      for split, found in by_name.items()
    )
    expected = f"files for each split, each of the {len(files)} in at most one"
    raise ValueError(unexpected("--splits", got, expected))
  return by_name


def _files(
  path: str, suffixes: tuple[str, ...], prefix: str
) -> tuple[list[str], str]:
  """Returns the files, and the folder that names are relative to."""
  if os.path.isdir(path):
    files = []
    for folder, below, names in walk(path):
      below[:] = [name for name in below if not is_by_program(name)]
      files += [
        os.path.join(folder, name)
        for name in names
        if name.endswith(suffixes) and not name.startswith(".")
      ]
    root = path
  else:
    files = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    root = os.path.dirname(re.split(r"[*?\[]", path)[0])
  if not files:
    raise ValueError(
      f"{prefix}{path}: got no file, expected {' or '.join(suffixes)}."
    )
  return sorted(files), root or "."


def split_of(path: str) -> str | None:
  """Returns the split that the last part of a path with one names, or None."""
  for part in reversed(path.lower().split(os.sep)):
    parts = re.split(r"[^a-z]+", part)
    splits = {SPLIT_OF[text] for text in parts if text in SPLIT_OF}
    if len(splits) == 1:
      return splits.pop()
  return None
