"""Which files of a source are in which split."""

import fnmatch
import glob
import itertools
import os
import re

from vit_jax.finetune.data.imports.listing import SPLIT_OF, SPLITS, Options
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
  patterns = {k: v for k, v in options.splits.items() if v is not None}
  if patterns:
    if len(patterns) < len(options.splits):
      raise ValueError(
        "--splits: got names with and without a pattern, expected one for all:"
        " train=train-*,validation=val-*."
      )
    by_name = {
      name: _matching(files, root, pattern, name)
      for name, pattern in patterns.items()
    }
    for (a, ours), (b, theirs) in itertools.combinations(by_name.items(), 2):
      if both := sorted({*ours} & {*theirs}):
        raise ValueError(
          f"--splits: got {len(both)} files in both {a} and {b}, such as"
          f" {os.path.relpath(both[0], root)}, expected a file in one split."
        )
    return by_name
  splits = {file: _split_of(os.path.relpath(file, root)) for file in files}
  if not any(splits.values()):
    names = list(options.splits) or ["train"]
    if len(names) > 1:
      raise ValueError(
        f"--splits: got {', '.join(names)}, but no name of a file in {path!r}"
        f" says its split; expected patterns: train=0*{suffixes[0]},"
        f"validation=1*{suffixes[0]}."
      )
    return {names[0]: files}
  if unknown := [file for file, split in splits.items() if not split]:
    raise ValueError(
      f"got {len(unknown)} of {len(files)} files whose names say no split, such"
      f" as {unknown[0]}; expected one of {', '.join(SPLIT_OF)} in each; or say"
      " which files are which: --splits=train=PATTERN,validation=PATTERN."
    )
  by_name = {
    name: [f for f in files if splits[f] == name]
    for name in SPLITS
    if name in splits.values()
  }
  if missing := sorted({*options.splits} - {*by_name}):
    raise ValueError(
      f"--splits: got {', '.join(missing)}, expected splits that the names of"
      f" files say: {', '.join(by_name)}."
    )
  return {k: v for k, v in by_name.items() if k in (options.splits or by_name)}


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
      f"got {prefix}{path}, which names no file; expected a folder with files"
      f" ending in {' or '.join(suffixes)}, a file, or a glob."
    )
  return sorted(files), root or "."


def _matching(
  files: list[str], root: str, pattern: str, name: str
) -> list[str]:
  matching = [
    file
    for file in files
    if fnmatch.fnmatch(os.path.relpath(file, root), pattern)
    or fnmatch.fnmatch(os.path.basename(file), pattern)
  ]
  if not matching:
    raise ValueError(
      f"--splits: got {name}={pattern}, which fits none of {len(files)} files,"
      f" such as {os.path.relpath(files[0], root)}."
    )
  return matching


def _split_of(path: str) -> str | None:
  """Returns the split that the last part of a path with one names."""
  for part in reversed(path.lower().split(os.sep)):
    parts = re.split(r"[^a-z]+", part)
    splits = {SPLIT_OF[text] for text in parts if text in SPLIT_OF}
    if len(splits) == 1:
      return splits.pop()
  return None
