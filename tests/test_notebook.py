"""The notebooks are stored clean, download nothing, and run to their ends.

They run in a new environment, which has a Jupyter kernel and what the first
cell of a notebook installs.
"""

import ast
import base64
import fnmatch
import glob
import importlib.metadata
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import address
import numpy as np
import pytest
from PIL import Image

nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(name):
  return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
  return [c for c in notebook.cells if c.cell_type == "code"]


@pytest.fixture(params=PATHS, ids=lambda p: p.stem)
def notebook_path(request):
  return request.param


@pytest.fixture
def notebook(notebook_path):
  return nbformat.read(notebook_path, as_version=4)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
  """Returns a kernel's name and the address of a repository.

  The kernel's environment is new. The repository has the package as it is in
  the checkout.
  """
  folder = tmp_path_factory.mktemp("bare")
  subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
  python = str(folder / "venv/bin/python")
  pip = [python, "-m", "pip", "install", "-q", "ipykernel"]
  subprocess.run(pip, check=True)
  kernel = {
    "argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "bare",
    "language": "python",
  }
  spec = folder / "jupyter/kernels/bare/kernel.json"
  spec.parent.mkdir(parents=True)
  spec.write_text(json.dumps(kernel))

  repository = folder / "repository"
  repository.mkdir()
  for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, repository)
  for name in ("vit_jax", "configs"):
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, repository / name, ignore=unwanted)
  git = ["git", "-C", str(repository)]
  name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
  for command in (["init", "-q"], ["add", "-A"], [*name, "commit", "-qmx"]):
    subprocess.run([*git, *command], check=True)

  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    yield "bare", f"file://localhost{repository}"
  shutil.rmtree(folder)  # 2.7 GB


def test_all_are_here():
  names = [
    "01_model",
    "02_data",
    "03_finetune",
    "04_fewshot",
    "05_inside",
    "06_pod",
  ]
  assert [p.stem for p in PATHS] == names
  cells = {code(read(name))[0].source for name in names}
  assert len(cells) == 1  # the same installation everywhere


@pytest.mark.parametrize(
  "device,extras",
  [
    ("", "train"),
    ("/dev/nvidia0", "train,cuda"),
    ("/dev/vfio/0", "train,tpu"),
    ("/dev/accel0", "train,tpu"),
  ],
)
def test_the_first_cell_installs_for_the_machine(monkeypatch, device, extras):
  commands = []

  def run(command, check):
    assert check
    commands.append(command)

  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  def found(pattern):
    return fnmatch.filter([device], pattern)

  monkeypatch.setattr(subprocess, "run", run)
  monkeypatch.setattr(glob, "glob", found)
  cell = code(read("01_model"))[0].source
  exec(cell, {})  # it is installed
  assert not commands
  monkeypatch.setattr(importlib.metadata, "version", missing)
  exec(_at("https://github.com/me/mine", cell), {})
  ((*pip, package),) = commands
  assert pip == [sys.executable, "-m", "pip", "install", "-q"]
  assert package == f"vit_jax[{extras}] @ git+https://github.com/me/mine"


def test_the_first_cell_asks_for_an_address(monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", missing)
  monkeypatch.delattr(subprocess, "run")
  cell = code(read("01_model"))[0].source
  with pytest.raises(SystemExit, match="REPOSITORY"):
    exec(_at("https://github.com/OWNER/any", cell), {})


def _at(repository, cell):
  """Returns the first cell with another address."""
  changed, count = re.subn(
    'REPOSITORY = ".*"', f'REPOSITORY = "{repository}"', cell
  )
  assert count == 1
  return changed


def test_the_link_opens_the_notebook(notebook_path):
  first = read(notebook_path.stem).cells[0].source
  site = "https://colab.research.google.com/github"
  link = f"{site}/{address.present()}/blob/main/notebooks/{notebook_path.name}"
  assert f"({link})" in first


def test_it_is_valid_and_has_no_traces_of_a_run(notebook):
  nbformat.validate(notebook)
  assert notebook.metadata == {
    "kernelspec": {
      "display_name": "Python 3",
      "language": "python",
      "name": "python3",
    },
    "language_info": {"name": "python"},
  }
  assert len({c.id for c in notebook.cells}) == len(notebook.cells)
  for cell in notebook.cells:
    assert cell.metadata == {}, cell.id
  for cell in code(notebook):
    assert cell.outputs == [] and cell.execution_count is None, cell.id
    ast.parse(cell.source, cell.id)


def test_what_it_names_is_there(notebook):
  text = "\n".join(c.source for c in notebook.cells)
  for path in re.findall(r"`((?:configs|docs|vit_jax)/[\w/]+\.\w+)", text):
    assert (ROOT / path).exists(), path
  for name in re.findall(r"`(\w+\.ipynb)`", text):
    assert (ROOT / "notebooks" / name).exists(), name
  for name in re.findall(r"notebooks/(\w+\.ipynb)", text):
    assert (ROOT / "notebooks" / name).exists(), name


def test_downloads_are_off(notebook):
  """One cell, at most, needs a network; it is marked, and does nothing."""
  cells = [c.source for c in code(notebook)[1:]]  # the first one installs
  network = ("gs://", "https://", "download_and_prepare", '"install"')
  marked = [c for c in cells if any(word in c for word in network)]
  assert marked
  for cell in marked:
    lines = cell.splitlines()
    guard = next(i for i, l in enumerate(lines) if l.startswith("if REAL:"))
    assert any(l.startswith("REAL = False") for l in lines[:guard])
    assert not any(w in l for l in lines[:guard] for w in network)
    rest = [l for l in lines[guard + 1 :] if l and not l.startswith("  ")]
    assert not rest, rest


def execute(bare, name, folder, probe="", twice=""):
  """Runs a notebook in an empty folder.

  Args:
    bare: Kernel, and address for the first cell.
    name: Its name.
    folder: The folder, with none of the repository's files.
    probe: A last cell.
    twice: Id of a cell that is executed twice; "": none is.

  Returns:
    The text that all cells print, what the probe prints at the end, and the
    pictures.
  """
  nbclient = pytest.importorskip("nbclient")
  notebook = read(name)
  kernel, repository = bare
  first = code(notebook)[0]
  first.source = _at(repository, first.source)
  env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
  env["JAX_PLATFORMS"] = "cpu"
  env.pop("XLA_FLAGS", None)  # one device
  if twice:
    at = [c.id for c in notebook.cells].index(twice)
    again = nbformat.v4.new_code_cell(notebook.cells[at].source)
    notebook.cells.insert(at + 1, again)
  notebook.cells.append(nbformat.v4.new_code_cell(probe))
  client = nbclient.NotebookClient(
    notebook,
    timeout=1800,  # the first one that runs installs the package
    kernel_name=kernel,
    resources={"metadata": {"path": str(folder)}},
  )
  client.execute(env=env)
  nbformat.write(notebook, folder / "executed.ipynb")  # to look at
  _, *cells, last = code(notebook)
  printed = "".join(o.text for c in cells for o in c.outputs if "text" in o)
  assert "\r" not in printed and "\x1b" not in printed  # no bar of a terminal
  outputs = [o.get("data", {}) for c in cells for o in c.outputs]
  pictures = []
  for output in outputs:
    if "image/png" in output:
      data = io.BytesIO(base64.b64decode(output["image/png"]))
      with Image.open(data) as image:
        pictures.append(np.asarray(image.convert("L")))
  for picture in pictures:
    assert min(picture.shape) > 100, picture.shape
    assert np.ptp(picture) > 200  # not blank
  print(text := "".join(o.text for o in last.outputs))
  return printed, text.split(), pictures


@pytest.mark.nightly
def test_model(bare, tmp_path):
  probe = "print(difference, losses[0], losses[-1], accuracy)"
  printed, values, pictures = execute(bare, "01_model", tmp_path, probe)
  assert "86,567,656 parameters" in printed
  assert "pos_embedding: 4x4 -> 6x12" in printed
  difference, first, last, accuracy = map(float, values)
  assert difference < 1e-5  # float32
  assert last < 0.5 * first and accuracy > 0.8  # 90 % with jax 0.12
  assert len(pictures) == 4


@pytest.mark.nightly
def test_data(bare, tmp_path):
  probe = (
    "print(labels_mixup[row].max(), labels_cutmix[row].max(), is_same,"
    " is_whole)"
  )
  printed, values, pictures = execute(bare, "02_data", tmp_path, probe)
  assert "Did you mean 'resize'?" in printed
  assert "mask [ True False False] records [ 3 -1 -1]" in printed
  assert "epoch 1: 1,297 different records" in printed
  assert all(0.5 < float(weight) < 0.9 for weight in values[:2])
  assert values[2:] == ["True", "True"]
  assert len(pictures) == 3


@pytest.mark.nightly
def test_fewshot(bare, tmp_path):
  probe = (
    "print(*(scores[k] for k in ('fewshot/10shot', 'fewshot/raw_pixels/10shot',"
    " 'knn/20nn', 'linear/top1')), len(wrong) / len(test_labels))"
  )
  printed, values, pictures = execute(bare, "04_fewshot", tmp_path, probe)
  assert "re-initialised  nothing" in printed
  # 93.9, 79.5, 97.8, 97.6 and 2.2 % with jax 0.10.2.
  fewshot, pixels, knn, linear, wrong = map(float, values)
  assert fewshot > pixels + 0.05 and knn > 0.95 and linear > 0.95
  assert wrong < 0.05
  assert len(pictures) == 3


@pytest.mark.nightly
def test_inside(bare, tmp_path):
  probe = (
    "print(accuracy, np.abs(by_hand - maps).max(), distances.min(),"
    " distances.max())"
  )
  printed, values, pictures = execute(bare, "05_inside", tmp_path, probe)
  assert "(4, 100, 4, 16, 16)" in printed
  accuracy, difference, least, most = map(float, values)
  assert accuracy >= 0.9 and difference < 1e-6  # float32
  # Between patches of 8 pixels: no further than corners apart.
  assert 0 < least < most < 24 * 2**0.5
  assert len(pictures) == 6


@pytest.mark.nightly
def test_pod(bare, tmp_path):
  probe = "print(is_same, largest, values[0])"
  printed, values, pictures = execute(
    bare, "06_pod", tmp_path, probe, "interrupt"
  )
  assert "8 devices" in printed and "does not fit 8 device(s)" in printed
  assert "resumes     step 20 of runs/notebook/pod/resumed" in printed
  assert values[0] == "True" and float(values[1]) < 1e-3
  # Parameters and two moments, float32: as printed beside their number.
  assert f"12 bytes each are {float(values[2]):.2f} GiB" in printed
  assert len(pictures) == 3


@pytest.mark.nightly
def test_finetune(bare, tmp_path):
  probe = "print(*series('test/top1')[1], len(predictions), *vit.image_size)"
  printed, values, pictures = execute(
    bare, "03_finetune", tmp_path, probe, "train"
  )
  work = tmp_path / "runs/notebook/finetune"
  log = work.with_suffix(".log").read_text()
  assert "steps were done before" in log  # the second execution
  # As the recipe `folder`: trials, a linear probe, the choice of the saved one.
  trials = json.loads((work / "trials.json").read_text())
  assert (
    len(trials["trials"]) > 5 and f"chosen      {trials['chosen']}" in printed
  )
  assert (
    json.loads((work / "linear_probe.json").read_text())["weight"] is not None
  )
  assert "saved       " in printed
  differences = re.findall(r"difference of a logit: (\S+)", printed)
  assert len(differences) == 3 and max(map(float, differences)) < 1e-5
  assert (work / "export/vit.safetensors").exists()
  accuracy, *_ = map(float, values)
  assert accuracy > 0.9  # chance is 10 %
  assert len(pictures) == 4  # the curves twice
