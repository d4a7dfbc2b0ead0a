"""The notebooks are stored clean, download nothing, and run to their ends."""

import ast
import base64
import importlib.metadata
import io
import os
import pathlib
import re
import subprocess
import sys

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
def notebook(request):
  return nbformat.read(request.param, as_version=4)


def test_all_are_here():
  names = [
    "01_model",
    "02_data",
    "04_fewshot",
    "05_inside",
    "06_pod",
    "finetune",
  ]
  assert [p.stem for p in PATHS] == names
  cells = {code(read(name))[0].source for name in names}
  assert len(cells) == 1  # the same installation everywhere


def test_the_first_cell_installs_the_package_where_it_is_missing(monkeypatch):
  commands = []

  def run(command, check):
    assert check
    commands.append(command)

  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(subprocess, "run", run)
  cell = code(read("finetune"))[0].source
  exec(cell, {})  # it is installed
  assert not commands
  monkeypatch.setattr(importlib.metadata, "version", missing)
  with pytest.raises(ValueError, match="REPOSITORY: got nothing"):
    exec(cell, {})
  exec(cell.replace('REPOSITORY = ""', 'REPOSITORY = "https://a/b"'), {})
  ((*pip, package),) = commands
  assert pip == [sys.executable, "-m", "pip", "install", "-q"]
  assert re.fullmatch(r"vit_jax\[train(,cuda)?\] @ git\+https://a/b", package)


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


def execute(name, folder, probe="", twice=""):
  """Runs a notebook in an empty folder.

  Args:
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
  env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
  del env["XLA_FLAGS"]  # one device
  if twice:
    at = [c.id for c in notebook.cells].index(twice)
    again = nbformat.v4.new_code_cell(notebook.cells[at].source)
    notebook.cells.insert(at + 1, again)
  notebook.cells.append(nbformat.v4.new_code_cell(probe))
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    kernel_name="python3",
    resources={"metadata": {"path": str(folder)}},
  )
  client.execute(env=env)
  *cells, last = code(notebook)
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
def test_model(tmp_path):
  probe = "print(difference, losses[0], losses[-1], accuracy)"
  printed, values, pictures = execute("01_model", tmp_path, probe)
  assert "86,567,656 parameters" in printed
  assert "pos_embedding: 4x4 -> 6x12" in printed
  difference, first, last, accuracy = map(float, values)
  assert difference < 1e-5  # float32
  assert last < 0.5 * first and accuracy > 0.8  # 90 % with jax 0.12
  assert len(pictures) == 4


@pytest.mark.nightly
def test_data(tmp_path):
  probe = (
    "print(labels_mixup[0].max(), labels_cutmix[0].max(), is_same, is_whole)"
  )
  printed, values, pictures = execute("02_data", tmp_path, probe)
  assert "Did you mean 'resize'?" in printed
  assert "mask [ True False False] records [ 3 -1 -1]" in printed
  assert "epoch 1: 1,297 different records" in printed
  assert all(0.5 < float(weight) < 0.9 for weight in values[:2])
  assert values[2:] == ["True", "True"]
  assert len(pictures) == 3


@pytest.mark.nightly
def test_fewshot(tmp_path):
  probe = (
    "print(*(scores[k] for k in ('fewshot/10shot', 'fewshot/raw_pixels/10shot',"
    " 'knn/20nn', 'linear/top1')), len(wrong) / len(test_labels))"
  )
  printed, values, pictures = execute("04_fewshot", tmp_path, probe)
  assert "re-initialised  nothing" in printed
  # 93.9, 79.5, 97.8, 97.6 and 2.2 % with jax 0.10.2.
  fewshot, pixels, knn, linear, wrong = map(float, values)
  assert fewshot > pixels + 0.05 and knn > 0.95 and linear > 0.95
  assert wrong < 0.05
  assert len(pictures) == 3


@pytest.mark.nightly
def test_inside(tmp_path):
  probe = (
    "print(accuracy, np.abs(by_hand - maps).max(), distances.min(),"
    " distances.max())"
  )
  printed, values, pictures = execute("05_inside", tmp_path, probe)
  assert "(4, 100, 4, 16, 16)" in printed
  accuracy, difference, least, most = map(float, values)
  assert accuracy >= 0.9 and difference < 1e-6  # float32
  # Between patches of 8 pixels: no further than corners apart.
  assert 0 < least < most < 24 * 2**0.5
  assert len(pictures) == 6


@pytest.mark.nightly
def test_pod(tmp_path):
  probe = "print(is_same, largest, values[0])"
  printed, values, pictures = execute("06_pod", tmp_path, probe, "interrupt")
  assert "8 devices" in printed and "does not fit 8 device(s)" in printed
  assert "resumes     step 20 of runs/notebook/pod/resumed" in printed
  assert values[0] == "True" and float(values[1]) < 1e-3
  # Parameters and two moments, float32: as printed beside their number.
  assert f"12 bytes each are {float(values[2]):.2f} GiB" in printed
  assert len(pictures) == 3


@pytest.mark.nightly
def test_finetune(tmp_path):
  probe = (
    "print(*series('test/top1')[1], few['fewshot/10shot'], len(predictions),"
    " vit.image_size)"
  )
  printed, values, pictures = execute("finetune", tmp_path, probe, "train")
  log = (tmp_path / "runs/notebook/finetune.log").read_text()
  assert "complete    all 100 steps were done before" in log
  assert "pos_embedding: 4x4 -> 6x6" in printed
  differences = re.findall(r"difference of a logit: (\S+)", printed)
  assert len(differences) == 3 and max(map(float, differences)) < 1e-5
  assert (tmp_path / "runs/notebook/export/vit.safetensors").exists()

  # 97.6 %, and 89.1 % with 10 labels a class (jax 0.10.2); chance is 10 %.
  accuracy, fewshot, count, *size = values
  assert float(accuracy) > 0.93 and float(fewshot) > 0.85
  assert (count, size) == ("64", ["(48,", "48)"])
  assert len(pictures) == 5  # the curves twice
