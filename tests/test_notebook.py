"""The notebooks are stored clean, download nothing, and run to their ends.

They run in a new environment, which has a Jupyter kernel and what the first
cell of a notebook installs.
"""

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
from collections.abc import Callable
from typing import NamedTuple

import address
import numpy as np
import pytest
import several
from PIL import Image

nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(name):
  return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
  return [c for c in notebook.cells if c.cell_type == "code"]


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

  repository = several.copied(folder / "repository")
  git = ["git", "-C", str(repository)]
  name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
  for command in (["init", "-q"], ["add", "-A"], [*name, "commit", "-qmx"]):
    subprocess.run([*git, *command], check=True)

  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    yield "bare", f"file://localhost{repository}"
  shutil.rmtree(folder)  # 2.7 GB


@pytest.mark.parametrize(
  "device, extras",
  [
    ("", "train"),
    ("/dev/nvidia0", "train,cuda"),
    ("/dev/vfio/0", "train,tpu"),
    ("/dev/accel0", "train,tpu"),
  ],
)
def test_the_first_cell_installs_for_the_machine(monkeypatch, device, extras):
  (cell,) = {code(nbformat.read(p, 4))[0].source for p in PATHS}  # of all
  commands = []

  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  found = lambda pattern: fnmatch.filter([device], pattern)
  monkeypatch.setattr(subprocess, "run", lambda x, check: commands.append(x))
  monkeypatch.setattr(glob, "glob", found)
  exec(cell, {})  # it is installed
  assert not commands
  monkeypatch.setattr(importlib.metadata, "version", missing)
  with pytest.raises(SystemExit, match="REPOSITORY"):
    exec(_at("https://github.com/OWNER/any", cell), {})
  exec(_at("https://github.com/me/mine", cell), {})
  ((*pip, package),) = commands
  assert pip == [sys.executable, "-m", "pip", "install", "-q"]
  assert package == f"vit_jax[{extras}] @ git+https://github.com/me/mine"


def _at(repository, cell):
  """Returns the first cell with another address."""
  changed, count = re.subn(
    'REPOSITORY = ".*"', f'REPOSITORY = "{repository}"', cell
  )
  assert count == 1
  return changed


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_it_is_clean_and_downloads_nothing(path):
  """One cell, at most, needs a network; it is marked, and does nothing."""
  notebook = read(path.stem)
  nbformat.validate(notebook)
  site = f"https://colab.research.google.com/github/{address.present()}"
  assert f"({site}/blob/main/notebooks/{path.name})" in notebook.cells[0].source
  assert notebook.metadata.keys() == {"kernelspec", "language_info"}
  assert notebook.metadata.kernelspec["name"] == "python3"
  assert all(cell.metadata == {} for cell in notebook.cells)
  for cell in code(notebook):
    assert cell.outputs == [] and cell.execution_count is None, cell.id
  network = ("gs://", "https://", "download_and_prepare", '"install"')
  sources = [cell.source for cell in code(notebook)[1:]]
  marked = [c for c in sources if any(word in c for word in network)]
  assert marked
  for cell in marked:
    lines = cell.splitlines()
    guard = next(i for i, l in enumerate(lines) if l.startswith("if REAL:"))
    assert any(l.startswith("REAL = False") for l in lines[:guard])
    assert not any(w in l for l in lines[:guard] for w in network)
    rest = [l for l in lines[guard + 1 :] if l and not l.startswith("  ")]
    assert not rest, rest


def execute(bare, name, folder, probe, twice):
  """Runs a notebook in an empty folder.

  Args:
    bare: Kernel, and address for the first cell.
    name: Its name.
    folder: The folder, with none of the repository's files.
    probe: A last cell.
    twice: Id of a cell that is executed twice; "": none is.

  Returns:
    The text that all cells print, what the probe prints at the end, and the
    number of pictures.
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
  pictures = [o["image/png"] for o in outputs if "image/png" in o]
  for picture in pictures:
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
      pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) > 100 and np.ptp(pixels) > 200  # not blank
  values = "".join(o.text for o in last.outputs).split()
  return printed, values, len(pictures)


class Case(NamedTuple):
  """What a notebook must show: texts, pictures, and numbers of the probe."""

  probe: str
  texts: tuple[str, ...]
  num_pictures: int
  is_right: Callable[..., bool]
  twice: str = ""


CASES = {
  "01_model": Case(
    "print(difference, losses[0], losses[-1], accuracy)",
    ("86,567,656 parameters", "pos_embedding: 4x4 -> 6x12"),
    4,
    # Rounding of float32; an accuracy of 90 % with jax 0.12.
    lambda d, first, last, top1: d < 1e-5 and last < 0.5 * first and top1 > 0.8,
  ),
  "02_data": Case(
    "print(labels_mixup[row].max(), labels_cutmix[row].max(), int(is_same),"
    " int(is_whole))",
    ("epoch 1: 1,297 different records",),
    3,
    lambda mixup, cutmix, *are: 0.5 < min(mixup, cutmix) < 0.9 and all(are),
  ),
  "03_finetune": Case(
    "print(*series('test/top1')[1], len(predictions), *vit.image_size)",
    ("saved       ",),
    4,
    lambda top1, *_: top1 > 0.9,  # chance is 10 %
    twice="train",
  ),
  "04_fewshot": Case(
    "print(*(scores[k] for k in ('fewshot/10shot', 'fewshot/raw_pixels/10shot',"
    " 'knn/20nn', 'linear/top1')), len(wrong) / len(test_labels))",
    ("re-initialised  nothing",),
    3,
    # 93.9, 79.5, 97.8, 97.6 and 2.2 % with jax 0.10.2.
    lambda few, pixels, knn, linear, wrong: (
      few > pixels + 0.05 and min(knn, linear) > 0.95 and wrong < 0.05
    ),
  ),
  "05_inside": Case(
    "print(accuracy, np.abs(by_hand - maps).max(), distances.min(),"
    " distances.max())",
    ("(4, 100, 4, 16, 16)",),
    6,
    # Between patches of 8 pixels: no further than corners apart.
    lambda top1, difference, least, most: (
      top1 >= 0.9 and difference < 1e-6 and 0 < least < most < 24 * 2**0.5
    ),
  ),
  "06_pod": Case(
    "print(int(is_same), largest, values[0])",
    ("8 devices", "does not fit 8 device(s)", "resumes     step 20 of"),
    3,
    lambda is_same, largest, *_: is_same and largest < 1e-3,
    twice="interrupt",
  ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_it_runs(path, bare, tmp_path):
  case = CASES[path.stem]
  printed, values, num_pictures = execute(
    bare, path.stem, tmp_path, case.probe, case.twice
  )
  for text in case.texts:
    assert text in printed
  assert case.is_right(*map(float, values))
  # Curves are drawn again by a cell that runs twice.
  assert num_pictures == case.num_pictures
  if path.stem == "03_finetune":
    log = tmp_path / "runs/notebook/finetune.log"
    assert "steps were done before" in log.read_text()
    differences = re.findall(r"difference of a logit: (\S+)", printed)
    assert len(differences) == 3 and max(map(float, differences)) < 1e-5
