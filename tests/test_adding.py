"""What CONTRIBUTING.md says of adding things is done, in a copy of the code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import several

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("vit_jax", "configs", "tests/adding", "tests/data")
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(
  re.findall(r"^### (An? [^\n]*)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
)
# The others take a minute or so, or hardly change.
EACH_TIME = ("A callback", "A model family", "A data set", "An evaluator")
BLOCK = re.compile(r"```(sh|diff)\n(.*?)```", re.DOTALL)


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
    for name in RECIPES
  ],
)
def test_recipe_works_as_written(name, tmp_path):
  for folder in COPIED:
    shutil.copytree(
      ROOT / folder,
      tmp_path / folder,
      ignore=shutil.ignore_patterns("__pycache__"),
    )
  blocks = BLOCK.findall(RECIPES[name])
  assert blocks
  here = pathlib.Path(sys.executable).parent  # so that "python" is this one
  env = {
    **several.env(),
    "PYTHONPATH": ".",
    "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
  }
  for kind, text in blocks:
    if kind == "diff":
      apply_diff(tmp_path, text)
    else:
      done = subprocess.run(
        ["bash", "-ec", text],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
      )
      assert done.returncode == 0, done.stdout + done.stderr
