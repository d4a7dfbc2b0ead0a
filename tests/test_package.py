"""The wheel, used where there is no checkout; and what it asks for."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import several

import vit_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = METADATA["project"]


def test_requirements_are_those_of_training():
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  assert [line for line in lines if not line.startswith("#")] == [
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["train"],
  ]


def test_the_version_is_one():
  version = re.escape(vit_jax.__version__)
  for name, pattern in (
    ("CITATION.cff", rf"^version: {version}$"),
    ("CHANGELOG.md", rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$"),
    ("README.md", rf"/vit_jax-{version}-py3-none-any\.whl"),
  ):
    assert re.search(pattern, (ROOT / name).read_text(), re.M), name


def test_a_type_checker_sees_the_public_names():
  """At run time they are imported at their first use."""
  tree = ast.parse((ROOT / "vit_jax/__init__.py").read_text())
  (block,) = (node for node in tree.body if isinstance(node, ast.If))
  names = {alias.name for node in block.body for alias in node.names}
  assert names | {"LETTERS", "__version__"} == {*vit_jax.__all__}
  assert (ROOT / "vit_jax/py.typed").exists()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
  """A copy of what is packed, in a folder with the name of a clone."""
  return several.copied(tmp_path_factory.mktemp("build") / "vit_jax")


def _output(command, **options):
  done = subprocess.run(command, capture_output=True, text=True, **options)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def built(sources):
  """The folder with the sdist, and the wheel that was built from it."""
  dist = sources.parent / "dist"
  _output([sys.executable, "-m", "build", "--outdir", dist, sources])
  return dist


def _installed(folder, *args):
  """Returns a Python that has what `pip install` takes, and its packages.

  Its dependencies are those of this environment, lent by a .pth file.
  """
  make = [sys.executable, "-m", "venv", "--without-pip", folder]
  subprocess.run(make, check=True)
  python = folder / "bin" / "python"
  install = ["--python", python, "install", "--quiet", "--no-deps", *args]
  subprocess.run([sys.executable, "-m", "pip", *install], check=True)
  (packages,) = folder.glob("lib/*/site-packages")
  lent = [path for path in sys.path if path.endswith("site-packages")]
  (packages / "lent.pth").write_text("\n".join(lent))
  return python, packages


@pytest.mark.slow
def test_what_is_built(built):
  assert len(list(built.glob("vit_jax-*.tar.gz"))) == 1
  (wheel,) = importlib.metadata.distributions(
    name="vit_jax", path=[str(w) for w in built.glob("*.whl")]
  )
  files = {str(file) for file in wheel.files}
  here = {p.relative_to(ROOT) for p in ROOT.glob("vit_jax/**/*") if p.is_file()}
  here = {str(p) for p in here if "__pycache__" not in p.parts}
  here |= {f"vit_jax/configs/{p.name}" for p in ROOT.glob("configs/*.py")}
  assert {f for f in files if f.startswith("vit_jax/")} == here
  extras = wheel.metadata.get_all("Provides-Extra")
  assert {*extras} == {*PROJECT["optional-dependencies"]}
  always = [r for r in wheel.requires if "extra ==" not in r]
  assert len(always) == len(PROJECT["dependencies"])


@pytest.mark.nightly
def test_the_wheel_outside_of_the_checkout(built, tmp_path):
  """CI installs its dependencies anew: `make test-wheel`."""
  (wheel,) = built.glob("*.whl")
  python, packages = _installed(tmp_path / "venv", wheel)
  check = [python, "-I", ROOT / "tests" / "check_wheel.py"]
  assert _output(check, cwd=tmp_path).startswith(str(packages))
