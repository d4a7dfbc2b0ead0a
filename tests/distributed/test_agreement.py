"""What the processes of a run must have alike."""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
import several
import tiny
from PIL import Image

from vit_jax.data import sources
from vit_jax.distributed import agreement
from vit_jax.models import cudnn

# One of two processes, which prints the error of each (values, folder).
PROCESS = """
import json, sys

address, index, pairs = json.loads(sys.argv[1])
import jax

jax.distributed.initialize(address, 2, index)
from vit_jax.config import ConfigError
from vit_jax.distributed import agreement

agreement.VISIBLE_SECONDS = 2.0
results = [agreement.broadcast_text(f"{index}" * (3 + index))]
checks = agreement.check, agreement.check_folder
for pair in pairs:
  for check, value in zip(checks, pair):
    try:
      check(value)
      results.append("")
    except ConfigError as e:
      results.append(e.errors[0])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_two_that_are_alike_go_on_and_two_that_differ_say_how(tmp_path):
  own = tmp_path / "0", tmp_path / "1"
  for folder in own:
    folder.mkdir()
  nan, address = float("nan"), several.address()
  alike = {"a": [1, 2], "b": None}, str(tmp_path)
  values = {"a": 1, "b": 2, "same": nan}, {"a": 1, "same": nan}
  commands = [
    [sys.executable, "-c", PROCESS]
    + [json.dumps([address, i, [alike, (values[i], str(own[i]))]])]
    for i in range(2)
  ]
  outputs = several.outputs(commands, several.env())
  results = [json.loads(out.splitlines()[-1]) for out in outputs]
  assert [result[:3] for result in results] == [["000", "", ""]] * 2
  (first, *_), (second, *_) = differ = [result[3:] for result in results]
  assert "process 1" in first
  assert second.startswith("b: got None in process 1, expected 2")
  for folder, (_, error) in zip(own, differ, strict=True):
    assert error.startswith(f"--workdir: got '{folder}'")
    assert [*folder.iterdir()] == []
  assert {*tmp_path.iterdir()} == {*own}


@pytest.fixture
def folder(tmp_path):
  for i in range(6):
    path = tmp_path / "here" / "ab"[i % 2] / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (i, i, i)).save(path)
  return tmp_path / "here"


def of_run(source, config=None, params=None):
  config = config or tiny.config()
  return agreement.of_run(config, {"train": source}, params or {})


def of_folder(path, split="train+val"):
  files = dict(data__data_dir=f"{path}/tfds", init=f"{path}/w.npz")
  config = tiny.config(data__dataset=f"folder:{path}", **files)
  return of_run(sources.open_source(f"folder:{path}", split), config)


def differing(first, second):
  return {k for k in first if first[k] != second[k]}


def test_where_a_host_has_its_files_is_its_own_affair(folder):
  there = shutil.copytree(folder, folder.parent / "somewhere" / "else")
  assert of_folder(folder) == of_folder(there)


CHANGES = {
  "missing": lambda folder: (folder / "a/0.png").unlink(),
  "renamed": lambda folder: (folder / "a/0.png").rename(folder / "a/7.png"),
  "moved": lambda folder: (folder / "a/0.png").rename(folder / "b/0.png"),
}


def test_other_files_and_other_parts_are_other_data(folder):
  first = of_folder(folder)
  for name, change in CHANGES.items():
    other = shutil.copytree(folder, folder.parent / name / "here")
    change(other)
    assert differing(first, of_folder(other)) == {"records of train"}, name
  parts = (of_folder(folder, f"train+val@4{x}") for x in ("", "/seed=1"))
  assert differing(*parts) == {"records of train"}


def test_other_code_options_weights_and_settings_are_reported(monkeypatch):
  source = sources.open_source("digits", "train", fake=True)
  params = {"head": {"bias": np.ones(3, "float32")}}
  half, more = tiny.config(model__dtype="bfloat16"), tiny.config(optim__lr=0.5)
  first = of_run(source, params=params)
  assert json.loads(json.dumps(first)) == first
  with jax.default_prng_impl("rbg"), jax.default_matmul_precision("float32"):
    second = of_run(source, params=params)
  settings = {"jax_default_prng_impl", "jax_default_matmul_precision"}
  assert differing(first, second) == settings
  params["head"]["bias"][1] = 1.0000001
  third = of_run(source, more, params)
  names = {"config.optim.lr", "initial value of head/bias"}
  assert differing(first, third) == names
  read = pathlib.Path.read_bytes
  changed = lambda path: read(path) + b"#" * (path.name == "optim.py")
  monkeypatch.setattr(pathlib.Path, "read_bytes", changed)
  fourth = of_run(source, more, params)
  assert differing(third, fourth) == {"code of vit_jax/optim.py"}
  # What computes attention.
  fifth = of_run(source, half)
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  monkeypatch.setattr(cudnn, "why_not", lambda *_: "too old")
  assert differing(fifth, of_run(source, half)) == {"attention"}
