"""The example of a format of weights, applied to a copy of the code.

Everything else is added from outside, see test_examples.py.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import several


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


@pytest.mark.nightly  # it takes a minute, and hardly changes
def test_a_format_is_added(tmp_path):
  several.copied(tmp_path, "vit_jax", "configs", "tests/adding", "tests/data")
  example = tmp_path / "tests/adding/format"
  shutil.copytree(example / "vit_jax", tmp_path / "vit_jax", dirs_exist_ok=True)
  apply_diff(tmp_path, (example / "change.diff").read_text())
  done = subprocess.run(
    [sys.executable, example / "check.py"],
    cwd=tmp_path,
    env={**several.env(), "PYTHONPATH": "."},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
