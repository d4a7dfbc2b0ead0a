"""The examples of CONTRIBUTING.md, applied to a copy of the code."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import several

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("vit_jax", "configs", "tests/adding", "tests/data")
EXAMPLES = sorted(path.name for path in (ROOT / "tests/adding").iterdir())
# The others take a minute or so, or hardly change.
EACH_TIME = ("callback", "data_set", "evaluator")


def apply_diff(folder: pathlib.Path, text: str) -> None:
  """Inserts the lines with "+" into the files, beside those that are there.

  "--- path" begins a file; lines with " " must follow each other there.
  """
  for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
    name, _, body = part.partition("\n")
    path = folder / name.strip()
    lines, at = path.read_text().splitlines(), 0
    for line in body.splitlines():
      if line.startswith("+"):
        lines.insert(at, line[1:])
        at += 1
      else:
        assert line[1:] in lines[at:], f"{name}: no line {line[1:]!r}"
        at = lines.index(line[1:], at) + 1
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=pytest.mark.slow if name in EACH_TIME else pytest.mark.nightly,
    )
    for name in EXAMPLES
  ],
)
def test_example_works(name, tmp_path):
  for folder in COPIED:
    shutil.copytree(
      ROOT / folder,
      tmp_path / folder,
      ignore=shutil.ignore_patterns("__pycache__"),
    )
  example = tmp_path / "tests/adding" / name
  if (example / "vit_jax").exists():
    shutil.copytree(
      example / "vit_jax", tmp_path / "vit_jax", dirs_exist_ok=True
    )
  if (example / "change.diff").exists():
    apply_diff(tmp_path, (example / "change.diff").read_text())
  done = subprocess.run(
    [sys.executable, example / "check.py"],
    cwd=tmp_path,
    env={**several.env(), "PYTHONPATH": "."},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
