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

# Two processes with different values: each prints the error that it gets.
PROCESS = """
import json, sys

address, index, values, folder = json.loads(sys.argv[1])
import jax

jax.distributed.initialize(address, 2, index)
from vit_jax.config import ConfigError
from vit_jax.distributed import agreement

agreement.VISIBLE_SECONDS = 2.0
results = [agreement.broadcast_text(f"{index}" * (3 + index))]
checks = (agreement.check, values), (agreement.check_folder, folder)
for check, value in checks:
  try:
    check(value)
    results.append("")
  except ConfigError as e:
    results.append(e.errors[0])
print(json.dumps(results))
"""


def both(values, folders):
  address = several.address()
  arguments = [
    json.dumps([address, i, values[i], str(folders[i])]) for i in range(2)
  ]
  commands = [[sys.executable, "-c", PROCESS, a] for a in arguments]
  results = several.outputs(commands, several.env())
  return [json.loads(out.splitlines()[-1]) for out in results]


@pytest.mark.slow
def test_processes_that_are_alike_go_on(tmp_path):
  values = {"a": [1, 2], "b": None}
  assert both([values, values], [tmp_path, tmp_path]) == [["000", "", ""]] * 2
  assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_those_that_differ_all_end_and_say_how(tmp_path):
  folders = tmp_path / "0", tmp_path / "1"
  for folder in folders:
    folder.mkdir()
  nan = float("nan")
  values = [{"a": 1, "b": 2, "same": nan}, {"a": 1, "same": nan}]
  first, second = both(values, folders)
  assert first[1] == ("got other options, data or versions in process 1.")
  assert second[1] == ("b: got None in process 1, expected 2 as in process 0.")
  for folder, result in zip(folders, (first, second), strict=True):
    assert result[2].startswith(
      f"--workdir: got '{folder}', where process 1 cannot find what process 0"
    )
    assert [*folder.iterdir()] == []


def of_run(source, config=None, params=None):
  config = config or tiny.config()
  return agreement.of_run(config, {"train": source}, params or {})


@pytest.fixture
def folder(tmp_path):
  for i in range(6):
    path = tmp_path / "here" / "ab"[i % 2] / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (i, i, i)).save(path)
  return tmp_path / "here"


def test_hosts_compare_what_computes_attention(folder, monkeypatch):
  source = sources.open_source(f"folder:{folder}", "train")
  config = tiny.config(model__dtype="bfloat16")
  assert of_run(source, config)["attention"] == ""
  monkeypatch.setattr(cudnn, "PLATFORMS", ("cpu",))
  cudnn.why_not.cache_clear()
  assert of_run(source, config)["attention"].startswith("XLA (")
  cudnn.why_not.cache_clear()


def test_where_a_host_has_its_files_is_its_own_affair(folder):
  there = shutil.copytree(folder, folder.parent / "somewhere" / "else")
  first, second = (
    sources.open_source(f"folder:{path}", "train") for path in (folder, there)
  )
  config, other = (
    tiny.config(
      data__data_dir=f"{path}/tfds",
      data__dataset=f"folder:{path}",
      init=f"{path}/w.npz",
    )
    for path in (folder, there)
  )
  assert of_run(first, config) == of_run(second, other)


@pytest.mark.parametrize("change", ["missing", "renamed", "moved", "subset"])
def test_other_files_are_other_data(folder, change):
  split, other = "train+val", "train+val"
  first = of_run(sources.open_source(f"folder:{folder}", split))
  if change == "missing":
    (folder / "a/0.png").unlink()
  elif change == "renamed":
    (folder / "a/0.png").rename(folder / "a/7.png")
  elif change == "moved":
    (folder / "a/0.png").rename(folder / "b/0.png")
  else:
    split, other = "train+val@4", "train+val@4/seed=1"
    first = of_run(sources.open_source(f"folder:{folder}", split))
  second = of_run(sources.open_source(f"folder:{folder}", other))
  differing = {k for k in first if first[k] != second[k]}
  assert differing == {"records of train"}


def test_other_code_and_settings_of_jax_are_reported(monkeypatch):
  source = sources.open_source("digits", "train", fake=True)
  first = of_run(source)
  with jax.default_prng_impl("rbg"), jax.default_matmul_precision("float32"):
    second = of_run(source)
  assert {k for k in first if first[k] != second[k]} == {
    *("jax_default_prng_impl", "jax_default_matmul_precision")
  }
  read = pathlib.Path.read_bytes
  monkeypatch.setattr(
    pathlib.Path,
    "read_bytes",
    lambda p: read(p) + b"#" * (p.name == "optim.py"),
  )
  third = of_run(source)
  assert {k for k in first if first[k] != third[k]} == {
    "code of vit_jax/optim.py"
  }


def test_other_options_and_weights_are_reported():
  source = sources.open_source("digits", "train", fake=True)
  params = {"head": {"bias": np.ones(3, "float32")}}
  first = of_run(source, params=params)
  params["head"]["bias"][1] = 1.0000001
  second = of_run(source, tiny.config(optim__lr=0.5), params)
  assert {k for k in first if first[k] != second[k]} == {
    "config.optim.lr",
    "initial value of head/bias",
  }
  assert json.loads(json.dumps(first)) == first
