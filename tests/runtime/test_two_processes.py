"""Several real processes train, stop, resume and evaluate as one would.

They run on this machine and meet on its loopback; their collectives are gloo's.
The single process that they are compared with is this one, on 1 or 2 devices.
"""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest
import several

from vit_jax import checkpoint, evaluate, sharding, train
from vit_jax.config import cli
from vit_jax.runtime.rows import MEASURED
from vit_jax.runtime.writer import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
# Plain SGD, since Adam makes a whole step of a gradient that is 0 but for
# rounding (that of the bias of the keys); a constant rate, since runs of 6 and
# 8 steps are compared.
CONFIG = """
from vit_jax.config import defaults

def get_config(scored="yes"):
  c = defaults()
  c.total_steps = 8
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.dataset = "digits"
  c.data.ops = "decode|resize(16)"
  c.data.batch_size = 24
  c.objective.mixup, c.objective.cutmix = 0.4, 1.0
  c.optim.name, c.optim.lr, c.optim.schedule = "sgd", 0.005, "constant"
  c.log_steps = 1
  c.checkpoint.every_steps, c.checkpoint.keep_last = 3, 3
  ops = "decode|resize(16)"
  split = {"split": "test[:101]", "ops": ops}
  if scored == "yes":
    c.evals = {
      "test": {"kind": "classification", **split},
      "few": {
        "kind": "fewshot",
        **split,
        "l2": (1.0,),
        "shots": (1, 5),
        "baselines": True,
        "every_steps": 7,
      },
      "near": {"kind": "knn", **split, "train_split": "train[:200]"},
      "line": {
        "kind": "linear",
        **split,
        "train_split": "train[:200]",
        "steps": 50,
      },
      "each": {"kind": "per_class", **split},
    }
  return c
"""
# One start, since that takes longest: the command, to step 6; then a run that
# is there, from step 6 to 8; then its scores, as each process knows them.
PROCESS = """
import json, pathlib, runpy, sys

words, config, workdir = json.loads(sys.argv[1])
sys.argv[1:] = words
runpy.run_module("vit_jax.train", run_name="__main__")

import jax
from vit_jax import evaluate, train
from vit_jax.config import cli

config = cli.parse("", {}, [config]).config
train.train_and_evaluate(config, workdir)
scores = evaluate.evaluate(config, workdir)
file = pathlib.Path(workdir) / f"scores{jax.process_index()}.json"
file.write_text(json.dumps(scores))
"""


class Runs(NamedTuple):
  """Folders of 8 steps, and what each process wrote to stdout and stderr.

  one, one_on_two: One process with one device, and with two.
  two: Two processes to step 6, and two others to step 8.
  two_four: Two to step 6, then four.
  two_three: Two to step 6, then three.
  four_one: Four, with parameters in shards, to step 6, then one.
  """

  config: pathlib.Path
  one: pathlib.Path
  one_on_two: pathlib.Path
  two: pathlib.Path
  two_four: pathlib.Path
  two_three: pathlib.Path
  four_one: pathlib.Path
  of_two: list[tuple[str, str]]
  of_four: list[tuple[str, str]]


def _start(num_processes, by_flags, config, words, workdir):
  """Runs `PROCESS` several times at once; returns their (stdout, stderr)."""
  env, address = several.env(), several.address()
  processes = []
  for i in range(num_processes):
    if by_flags:
      more = [f"--coordinator={address}", f"--process_id={i}"]
      more += [f"--num_processes={num_processes}"]
    else:
      more = []
      env |= {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(i),
      }
    asked = json.dumps(
      [
        [f"--config={config}:no", "--config.total_steps=6", *words, *more],
        f"--config={config}",
        str(workdir),
      ]
    )
    processes.append(
      subprocess.Popen(
        [sys.executable, "-c", PROCESS, asked],
        env=dict(env),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
      )
    )
  try:
    outputs = [p.communicate(timeout=400) for p in processes]
  finally:
    for p in processes:
      p.kill()
  # One that dies takes the others along: its own words tell why.
  words = "\n".join(
    f"{p.returncode}: {o + e}"
    for p, (o, e) in zip(processes, outputs, strict=True)
  )
  assert not any(p.returncode for p in processes), words
  return outputs


@contextlib.contextmanager
def _devices(count):
  """This process then uses so many of its devices."""
  make_mesh = sharding.make_mesh
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      sharding,
      "make_mesh",
      lambda mesh: make_mesh(mesh, jax.devices()[:count]),
    )
    yield


def _parsed(config):
  return cli.parse("", {}, [f"--config={config}"]).config


def _alone(config, workdir, num_devices):
  with _devices(num_devices):
    train.train_and_evaluate(_parsed(config), str(workdir))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  tmp = tmp_path_factory.mktemp("runs")
  config = tmp / "tiny.py"
  config.write_text(CONFIG)
  runs = {name: tmp / name for name in Runs._fields[1:7]}
  _alone(config, runs["one"], 1)
  _alone(config, runs["one_on_two"], 2)
  words = [f"--workdir={runs['two']}"]
  of_two = _start(2, False, config, words, runs["two"])
  for name in ("two_four", "two_three"):
    shutil.copytree(runs["two"], runs[name], ignore=shutil.ignore_patterns("8"))
  words = [f"--workdir={runs['four_one']}", "--config.mesh.fsdp=2"]
  of_four = _start(4, True, config, words, runs["two_four"])
  _alone(config, runs["four_one"], 1)
  _start(3, False, config, [f"--workdir={tmp / 'three'}"], runs["two_three"])
  return Runs(config, *runs.values(), of_two, of_four)


def _values(workdir):
  """(step, name) -> value, each of which must have been written once."""
  found = {}
  for row in read_metrics(str(workdir)):
    for key, value in row.items():
      if "/" in key and key not in MEASURED:
        assert (row["step"], key) not in found
        found[row["step"], key] = value
  return found


def _state(workdir, step=8):
  """Path -> array, of the parameters and of the optimizer."""
  return {
    f"{item}/{sharding.path_of(path)}": np.asarray(leaf)
    for item in ("params", "train")
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      checkpoint.load_tree(str(workdir / "checkpoints" / str(step) / item))[0]
    )
  }


# The accuracies are quotients of counts, and must not differ at all.
EXACT = r"train/(lr|epoch)|(test|each)/(top|count|per|worst)|few/|near/|line/"


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["one_on_two", "two", "two_four", "two_three", "four_one"]
)
def test_the_numbers_are_those_of_one_process(runs, name):
  """Agrees to 1e-6: devices add float32 (eps 1.2e-7) in another order."""
  one, other = _values(runs.one), _values(getattr(runs, name))
  assert other.keys() == one.keys()
  assert one[8, "test/count"] == 101
  for key, value in one.items():
    rtol = 0 if re.match(EXACT, key[1]) else 1e-6
    np.testing.assert_allclose(other[key], value, rtol, err_msg=str(key))
  states = _state(runs.one), _state(getattr(runs, name))
  assert states[0].keys() == states[1].keys()
  for key, value in states[0].items():
    np.testing.assert_allclose(
      states[1][key], value, 0, 1e-6 * max(np.abs(value).max(), 1), err_msg=key
    )


@pytest.mark.slow
def test_two_processes_are_one_with_two_devices_bit_for_bit(runs):
  """A sum of two numbers has one order only, also after a stop."""
  one, two = _state(runs.one_on_two), _state(runs.two)
  assert one.keys() == two.keys()
  for key, value in one.items():
    np.testing.assert_array_equal(two[key], value, err_msg=key)
  one, two = _values(runs.one_on_two), _values(runs.two)
  for key, value in one.items():
    if key[1].startswith("train/"):
      assert two[key] == value, key


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, count", [("two", 2), ("two_three", 3), ("two_four", 4)]
)
def test_evaluation_is_exact_in_every_process(runs, name, count):
  workdir = getattr(runs, name)
  told = [
    json.loads((workdir / f"scores{i}.json").read_text()) for i in range(count)
  ]
  assert all(scores == told[0] for scores in told)
  with _devices(1):
    alone = evaluate.evaluate(_parsed(runs.config), str(workdir))
  assert alone.keys() == told[0].keys()
  for key, value in alone.items():
    rtol = 0 if re.match(EXACT, key) else 1e-6
    np.testing.assert_allclose(told[0][key], value, rtol, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_two", "of_four"])
def test_only_process_0_speaks(runs, name):
  (out, err), *others = getattr(runs, name)
  count = 1 + len(others)
  assert f"{count} process(es)" in err and "step 6/6" in err
  assert "resumes     step 6" in err and "step 8/8" in err
  assert re.search(r"^step 8: test", out, re.M)  # of evaluate
  for out, err in others:
    # gloo itself greets, in C++.
    assert re.sub(r"^\[Gloo\].*\n", "", out, flags=re.M) == ""
    assert not re.search(r"^(parameter|devices|resumes|step) ", err, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "two_three", "two_four", "four_one"])
def test_a_checkpoint_is_written_once(runs, name):
  folder = getattr(runs, name) / "checkpoints"
  assert sorted(p.name for p in folder.iterdir()) == ["3", "6", "8"]
  for step in (3, 6, 8):
    sizes = [
      sum(
        f.stat().st_size for f in (run / str(step)).rglob("ocdbt.process_*/d/*")
      )
      for run in (runs.one / "checkpoints", folder)
    ]
    assert sizes[1] < 1.5 * sizes[0]  # every number once, whoever holds it
    params, metadata = checkpoint.load_params(str(folder / str(step)))
    assert metadata["step"] == step and params.keys() > {"head"}
  config = json.loads((folder.parent / "config.json").read_text())
  assert config["total_steps"] == 8
