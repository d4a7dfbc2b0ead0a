"""Writes the address of the repository wherever the project names it.

Run: python benchmarks/address.py https://github.com/OWNER/NAME

The address stands in pyproject.toml, as project.urls.Repository. README, docs
and CITATION.cff, the notebooks' first cells, and the links to Colab and to CI
repeat it. Run the script in a copy of the project under another address, too.
"""

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
ADDRESS = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def present(root: pathlib.Path = ROOT) -> str:
  """Returns OWNER/NAME of the address in pyproject.toml."""
  project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
  return _repository(project["urls"]["Repository"])


def places(repository: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """Returns the tracked files that have a link to OWNER/NAME."""
  command = ["git", "-C", str(root), "ls-files", "-z"]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  links, found = _links(repository), []
  for name in filter(None, done.stdout.split("\0")):
    try:
      text = (root / name).read_text()
    except (UnicodeDecodeError, FileNotFoundError):  # a picture; deleted
      continue
    if links.search(text):
      found.append(root / name)
  return found


def write(address: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """Replaces the present address everywhere, and returns the files.

  Args:
    address: https://github.com/OWNER/NAME.
    root: The checkout.

  Raises:
    ValueError: The address has another form; Colab opens notebooks of GitHub.
  """
  new, old = _repository(address), present(root)
  files = places(old, root)
  for path in files:
    path.write_text(_links(old).sub(new, path.read_text()))
  return files


def _links(repository: str) -> re.Pattern:
  """Returns what finds OWNER/NAME in links to GitHub and to Colab."""
  site = r"(?:(?<=//github\.com/)|(?<=colab\.research\.google\.com/github/))"
  return re.compile(rf"{site}{re.escape(repository)}(?![\w-])")


def _repository(address: str) -> str:
  match = ADDRESS.fullmatch(address)
  if not match:
    raise ValueError(
      f"address: got {address!r}, expected https://github.com/OWNER/NAME."
    )
  return match[1]


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit(__doc__)
  try:
    for changed in write(sys.argv[1]):
      print(changed.relative_to(ROOT))
  except ValueError as e:
    sys.exit(str(e))
