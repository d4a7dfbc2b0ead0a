"""Several real processes train, stop, resume and evaluate as one would.

They run on this machine and meet on its loopback; their collectives are gloo's.
The single process that they are compared with is this one, on 1 or 2 devices.
"""

import json
import pathlib
import re
import shutil
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest
import several
import tiny
from faults.runs import arrays

from vit_jax import evaluate, train
from vit_jax.checkpointing import checkpointer
from vit_jax.config import cli
from vit_jax.distributed.processes import VARIABLES
from vit_jax.writers.metric_writer import is_measured, read_metrics

pytestmark = pytest.mark.nightly
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
  split = dict(split="test[:101]", ops="decode|resize(16)")
  learns = dict(train_split="train[:200]", **split)
  few = dict(l2=(1.0,), shots=(1, 5), baselines=True, every_steps=7)
  if scored == "yes":
    c.evals = dict(
      test=dict(kind="classification", **split),
      few=dict(kind="fewshot", **few, **split),
      near=dict(kind="knn", **learns),
      line=dict(kind="linear", steps=50, **learns),
      each=dict(kind="per_class", **split),
    )
  return c
"""
# One start, since that takes longest: the command, to step 6; then a run that
# is there, from step 6 to 8; then its scores, as each process knows them.
PROCESS = """
import json, pathlib, runpy, sys

options, config, workdir = json.loads(sys.argv[1])
sys.argv[1:] = options
runpy.run_module("vit_jax.train", run_name="__main__")

import jax
from vit_jax import evaluate
from vit_jax import train
from vit_jax.config import cli
from vit_jax.distributed.processes import VARIABLES

config = cli.parse("", {}, [config]).config
train.train_and_evaluate(config, workdir)
scores = evaluate.record(config, workdir, workdir)["scores"]  # as its command
file = pathlib.Path(workdir) / f"scores{jax.process_index()}.json"
file.write_text(json.dumps(scores))
"""


def _start(num_processes, by_flags, config, options, workdir):
  """Runs `PROCESS` several times at once; returns their (stdout, stderr)."""
  address, commands, envs = several.address(), [], []
  first = [f"--config={config}:no", "--config.total_steps=6", *options]
  for i in range(num_processes):
    place = (address, str(num_processes), str(i))
    flags, env = [], several.env()
    if by_flags:
      names = "coordinator", "num_processes", "process_id"
      flags = [f"--{k}={v}" for k, v in zip(names, place, strict=True)]
    else:
      env |= dict(zip(VARIABLES, place, strict=True))
    told = json.dumps([[*first, *flags], f"--config={config}", str(workdir)])
    commands.append([sys.executable, "-c", PROCESS, told])
    envs.append(env)
  results = several.run(commands, envs)
  # One that dies takes the others along: its own output tells why.
  assert not any(code for code, *_ in results), results
  return [texts for _, *texts in results]


def _alone(config, workdir, num_devices, act=train.train_and_evaluate):
  """Trains or evaluates in this process, which then has so many devices."""
  parsed = cli.parse("", {}, [f"--config={config}"]).config
  with tiny.devices(num_devices):
    return act(parsed, str(workdir))


class Runs(NamedTuple):
  """The folders of runs of 8 steps by name, and what their processes printed.

  one: One process with two devices.
  two: Two processes to step 6, and two others to step 8.
  two_four: `two` to step 6, then four processes.
  four_one: Four processes, in shards, to step 6; then one.
  """

  config: pathlib.Path
  folders: dict[str, pathlib.Path]
  outputs: dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  config = folder / "tiny.py"
  config.write_text(CONFIG)
  path = {
    name: folder / name for name in ("one", "two", "two_four", "four_one")
  }
  _alone(config, path["one"], 2)
  options = [f"--workdir={path['two']}"]
  two = _start(2, False, config, options, path["two"])
  ignored = shutil.ignore_patterns("8")
  shutil.copytree(path["two"], path["two_four"], ignore=ignored)
  options = [f"--workdir={path['four_one']}", "--config.mesh.fsdp=2"]
  four = _start(4, True, config, options, path["two_four"])
  _alone(config, path["four_one"], 1)
  return Runs(config, path, {"two": two, "two_four": four})


def _values(workdir):
  """(step, name) -> value, each of which must have been written once."""
  values = {}
  for row in read_metrics(str(workdir)):
    for key, value in row.items():
      if "/" in key and not is_measured(key):
        assert (row["step"], key) not in values
        values[row["step"], key] = value
  return values


# The accuracies are quotients of counts, and must not differ at all.
EXACT = r"train/(lr|epoch)|(test|each)/(top|count|per|worst)|few/|near/|line/"


@pytest.mark.parametrize("name", ["two", "two_four", "four_one"])
def test_the_numbers_are_those_of_one_process(runs, name):
  """Agrees to 1e-6: devices add float32 (eps 1.2e-7) in another order.

  A sum of two numbers has one order only, also after a stop: the bits of two
  processes are those of one with two devices.
  """
  values, other = (_values(runs.folders[k]) for k in ("one", name))
  assert other.keys() == values.keys() and values[8, "test/count"] == 101
  for key, value in values.items():
    is_exact = re.match(EXACT, key[1])
    is_exact = is_exact or (name == "two" and key[1].startswith("train/"))
    rtol = 0 if is_exact else 1e-6
    np.testing.assert_allclose(other[key], value, rtol, err_msg=str(key))
  state, other = (arrays(runs.folders[k]) for k in ("one", name))
  assert other.keys() == state.keys()
  for key, value in state.items():
    atol = 0 if name == "two" else 1e-6 * max(np.abs(value).max(), 1)
    np.testing.assert_allclose(other[key], value, 0, atol, err_msg=key)


@pytest.mark.parametrize("name", ["two", "two_four"])
def test_evaluation_is_exact_in_every_process(runs, name):
  folder = runs.folders[name]
  scored = [
    json.loads((folder / f"scores{i}.json").read_text())
    for i in range(len(runs.outputs[name]))
  ]
  assert all(scores == scored[0] for scores in scored)
  alone = _alone(runs.config, folder, 1, evaluate.evaluate)
  assert alone.keys() == scored[0].keys()
  for key, value in alone.items():
    rtol = 0 if re.match(EXACT, key) else 1e-6
    np.testing.assert_allclose(scored[0][key], value, rtol, err_msg=key)


def test_only_process_0_speaks(runs):
  (out, err), *others = runs.outputs["two_four"]
  for text in ("4 process(es)", "resumes ", "step 8/8"):
    assert text in err
  assert re.search(r"^step 8: test", out, re.M)  # of evaluate
  for out, err in others:
    # gloo itself greets, in C++.
    assert re.sub(r"^\[Gloo\].*\n", "", out, flags=re.M) == ""
    assert not re.search(r"^(parameter|devices|resumes|step) ", err, re.M)


@pytest.mark.parametrize("name", ["two", "two_four", "four_one"])
def test_a_checkpoint_is_written_once(runs, name):
  one, folder = (runs.folders[k] / "checkpoints" for k in ("one", name))
  assert sorted(p.name for p in folder.iterdir()) == ["3", "6", "8"]
  for step in (3, 6, 8):
    sizes = [
      sum(
        f.stat().st_size
        for f in (checkpoints / str(step)).rglob("ocdbt.process_*/d/*")
      )
      for checkpoints in (one, folder)
    ]
    assert sizes[1] < 1.5 * sizes[0]  # every number once, whoever holds it
    params, metadata = checkpointer.load_params(str(folder / str(step)))
    assert metadata["step"] == step and params.keys() > {"head"}


# Four processes with two devices each; two processes stand for a TPU slice.
SLICES = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2]))
import numpy as np
import tiny
from vit_jax import sharding

sharding.slice_of = lambda device: device.process_index // 2
parts = tiny.Parts(tiny.config(mesh__fsdp=-1, optim__name="sgd"))
of_slice = [sorted({sharding.slice_of(d) for d in row.flat})
            for row in parts.mesh.devices]
whole = tiny.batch
rows = slice(4 * int(sys.argv[2]), 4 * int(sys.argv[2]) + 4)
tiny.batch = lambda *a: {k: v[rows] for k, v in whole(*a).items()}
results = parts.run(3)[1], dict(parts.mesh.shape), of_slice
print("RESULTS" + json.dumps(results), flush=True)
jax.distributed.shutdown()
"""


def test_processes_that_stand_for_slices_train_as_one():
  """Each slice holds whole copies, and only sums pass between them."""
  address, root = several.address(), several.ROOT
  env = several.env(2) | {
    "PYTHONPATH": f"{root}:{root / 'tests'}",
    "JAX_PLATFORMS": "cpu",
  }
  commands = [[sys.executable, "-c", SLICES, address, str(i)] for i in range(4)]
  outputs = several.outputs(commands, env)
  results = [json.loads(out.split("RESULTS")[1]) for out in outputs]
  assert all(other == results[0] for other in results)
  metrics, shape, of_slice = results[0]
  assert shape == {"data": 2, "fsdp": 4, "tensor": 1}
  assert of_slice == [[0], [1]]
  config = tiny.config(optim__name="sgd")
  one = tiny.Parts(config, jax.devices()[:1]).run(3)[1]
  for got, expected in zip(metrics, one, strict=True):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
      # Devices add float32 in another order.
      np.testing.assert_allclose(got[key], value, 1e-5, err_msg=key)
