"""What pyproject.toml cannot say; all else is there."""

import pathlib
import sys

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent


def requirements(file: str) -> list[str]:
  """Returns the lines of a file beside those of requirements.txt."""
  found = []
  for line in (ROOT / file).read_text().splitlines():
    if line.startswith("-r "):
      other = line.removeprefix("-r ").strip()
      found += requirements(other) if other != "requirements.txt" else []
    elif line and not line.startswith("#"):
      found.append(line)
  return found


EXTRAS = ("cuda", "onnx", "parity", "serve", "test", "tpu", "trackers")

packages = [
  *find_packages(include=["vit_jax*"]),
  "vit_jax.reporting.try_page",  # a page's files, no code
]
# With the root alone, an editable install is a line of a .pth file. setuptools
# has hooks for any other layout, which a folder vit_jax where Python starts, as
# a clone is, comes before.
package_dir = {"": "."}
if "editable_wheel" not in sys.argv:
  # configs/ is at the top of the repository, and in the package when installed.
  packages.append("vit_jax.configs")
  package_dir["vit_jax.configs"] = "configs"

setup(
  packages=packages,
  package_dir=package_dir,
  extras_require={e: requirements(f"requirements-{e}.txt") for e in EXTRAS},
)
