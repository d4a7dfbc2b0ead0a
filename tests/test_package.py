"""The wheel, used where there is no checkout; and what it asks for."""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ("vit_jax", "configs", "pyproject.toml", "setup.py", "MANIFEST.in")
SOURCES += ("README.md", "LICENSE")


def _requirements(name):
  lines = (ROOT / name).read_text().splitlines()
  return {x for x in lines if x and not x.startswith(("#", "-r"))}


def test_every_extra_is_a_file_and_every_file_an_extra():
  code = (ROOT / "setup.py").read_text()
  extras = re.search(r"^EXTRAS = \((.*)\)$", code, re.MULTILINE)[1]
  listed = re.findall(r"\w+", extras)
  assert listed == sorted(listed)
  kept = {p.stem.removeprefix("requirements-") for p in ROOT.glob("r*-*.txt")}
  assert {*listed} == kept - {"lean"}


@pytest.mark.parametrize(
  "path", sorted(ROOT.glob("requirements*.txt")), ids=lambda p: p.stem
)
def test_every_requirement_has_bounds(path):
  """jax's, of the extras that choose its chip, are in requirements.txt."""
  for line in _requirements(path.name):
    assert re.search(r">=.*,<|==|^jax\[", line), line


def test_the_command_is_the_one_of_the_package():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["scripts"] == {"vit-jax": "vit_jax.__main__:main"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The folder with the sdist, and the wheel that was built from it."""
  base = tmp_path_factory.mktemp("build")
  sources = base / "sources"
  sources.mkdir()
  ignored = shutil.ignore_patterns("__pycache__")
  for name in (*SOURCES, *(p.name for p in ROOT.glob("requirements*.txt"))):
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, sources / name, ignore=ignored)
    else:
      shutil.copy(ROOT / name, sources)
  words = [sys.executable, "-m", "build", "--outdir", base / "dist", sources]
  done = subprocess.run(words, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return base / "dist"


@pytest.mark.slow
def test_what_is_built(built):
  assert len(list(built.glob("vit_jax-*.tar.gz"))) == 1
  (wheel,) = importlib.metadata.distributions(
    name="vit_jax", path=[str(w) for w in built.glob("*.whl")]
  )
  held = {str(file) for file in wheel.files}
  here = {p.relative_to(ROOT) for p in ROOT.glob("vit_jax/**/*") if p.is_file()}
  here = {str(p) for p in here if "__pycache__" not in p.parts}
  here |= {f"vit_jax/configs/{p.name}" for p in ROOT.glob("configs/*.py")}
  assert {f for f in held if f.startswith("vit_jax/")} == here
  asked = {*wheel.metadata.get_all("Provides-Extra")}
  assert {"tpu", "cuda", "parity", "serve", "trackers", "onnx"} < asked
  always = [r for r in wheel.requires if "extra ==" not in r]
  assert len(always) == len(_requirements("requirements.txt"))


@pytest.mark.nightly
def test_the_wheel_outside_of_the_checkout(built, tmp_path):
  """Its dependencies are those of this environment, lent by a .pth file.

  CI installs them anew: `make test-wheel`.
  """
  (wheel,) = built.glob("*.whl")
  new = tmp_path / "venv"
  make = [sys.executable, "-m", "venv", "--without-pip", new]
  subprocess.run(make, check=True)
  python = new / "bin" / "python"
  install = ["--python", python, "install", "--quiet", "--no-deps", wheel]
  subprocess.run([sys.executable, "-m", "pip", *install], check=True)
  (packages,) = new.glob("lib/*/site-packages")
  lent = [path for path in sys.path if path.endswith("site-packages")]
  (packages / "lent.pth").write_text("\n".join(lent))
  done = subprocess.run(
    [python, "-P", ROOT / "tests" / "check_wheel.py"],
    capture_output=True,
    text=True,
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.startswith(str(packages))
