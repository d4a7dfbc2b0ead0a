"""The modules of `examples/`, in a folder outside of vit_jax.

They are those of CONTRIBUTING.md, and train with every part of a run.
"""

import pathlib
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import several
from faults import runs
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax import sharding
from vit_jax.commands import train
from vit_jax.config import cli, freeze
from vit_jax.tools.exporting import convert
from vit_jax.tools.planning import planner
from vit_jax.tools.reporting import model_figures
from vit_jax.tools.reporting.charts import ChartFiles
from vit_jax.train import train_and_evaluate

CONFIG = "--config=my_run.py"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
  """The current folder: a copy of `examples/`."""
  folder = tmp_path_factory.mktemp("outside") / "lab"
  shutil.copytree(several.ROOT / "examples", folder)
  shutil.copy(several.ROOT / "tests/faulty.py", folder)
  with pytest.MonkeyPatch.context() as patch:
    for name in [n for n in sys.modules if n.startswith("my_lab")]:
      patch.delitem(sys.modules, name)
    patch.syspath_prepend(folder)
    patch.chdir(folder)
    yield folder
  for name in [n for n in sys.modules if n.startswith("my_lab")]:
    del sys.modules[name]


def _start(*argv, devices=1):
  """Starts the command line in the current folder."""
  return subprocess.Popen(
    [*several.SCRIPT, *argv],
    env={**several.env(devices), "PYTHONPATH": str(several.ROOT)},
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,
  )


def _output(*argv, devices=1):
  """Runs the command line to its end; returns what it prints."""
  process = _start(*argv, devices=devices)
  try:
    output, _ = process.communicate(timeout=300)
  finally:
    runs.kill([process])
  assert process.returncode == 0, output
  return output


@pytest.fixture(scope="module")
def whole(lab):
  """A run of 12 steps."""
  _output("train", CONFIG, "--workdir=runs/whole")
  return pathlib.Path("runs/whole")


@pytest.mark.nightly
def test_killed_and_resumed_it_ends_in_the_same_bits(whole):
  workdir = pathlib.Path("runs/killed")
  argv = "train", CONFIG, f"--workdir={workdir}"
  process = _start(*argv)
  try:
    end = time.monotonic() + 200
    while not (workdir / "checkpoints/4").is_dir():
      assert process.poll() is None, process.communicate()
      assert time.monotonic() < end
      time.sleep(0.01)
  finally:
    runs.kill([process])  # SIGKILL
  assert not (workdir / "checkpoints/12").exists()
  assert "resumes     step" in _output(*argv)
  assert runs.assert_same(workdir, whole) > 10**6
  arrays = "".join(runs.arrays(whole))
  for part in (
    "train['averages']['teacher']['block_0']",
    "train['memory']['cosine']['last']['block_0']",
    "train['memory']['cosine']['mean']['block_0']",
  ):
    assert part in arrays


@pytest.mark.nightly
def test_four_devices_give_the_same(whole):
  """And a metric that is not finite at first is noted and written."""
  callbacks = "my_lab.cosine:Cosine(decay=0.5),faulty:Logarithm"
  flags = f"{CONFIG}:{whole}", "--workdir=runs/four", "--config.mesh.fsdp=2"
  flags += (f"--config.callbacks={callbacks}",)
  printed = _output("train", *flags, devices=4)
  assert "mesh data=2 x fsdp=2" in printed
  assert "not finite" in printed and "the run continues" in printed
  rows = runs.rows(pathlib.Path("runs/four"))
  names = {"train/loss", "train/accuracy", "train/cosine/block_3"}
  of_steps = [
    [r for r in x if "train/loss" in r] for x in (runs.rows(whole), rows)
  ]
  for a, b in zip(*of_steps, strict=True):
    assert names < a.keys()
    for key in a.keys() & b.keys():
      np.testing.assert_allclose(b[key], a[key], 1e-4, 1e-4, err_msg=key)
  values = [r["train/logarithm"] for r in of_steps[1]]
  assert np.isnan(values[0]) and values[1] == -np.inf
  assert np.isfinite(values[2:]).all()
  (row,) = [r for r in rows if "agreement/cka" in r]
  assert row["agreement/cka"] == pytest.approx(1, abs=1e-3)  # nearly that run


@pytest.fixture(scope="module")
def tuned(lab):
  """A run with a projection of the objective's, fine-tuned with LoRA at 24."""
  import my_run

  c = my_run.get_config()
  c.objective.kind = "faulty:Headed"
  c.callbacks, c.evals, c.total_steps, c.optim.warmup_steps = (), {}, 2, 0
  state = train_and_evaluate(freeze(c), "runs/headed")
  assert "projection" in state.params
  c.init, c.objective.kind = "runs/headed", "classification"
  c.data.ops = "decode|resize(24)"
  score = {"kind": "classification", "split": "test", "ops": c.data.ops}
  c.evals = {"test": score}
  c.lora.rank, c.lora.targets = 2, ("query", "value", "mlp_in")
  train_and_evaluate(freeze(c), "runs/tuned")
  return vit_jax.load("runs/tuned", verbose=False)


@pytest.mark.nightly
def test_adapters_move_what_they_name_alone(tuned):
  old = vit_jax.load("runs/headed", image_size=24, verbose=False)
  before = flatten_dict(old.params, sep="/")
  after = flatten_dict(tuned.params, sep="/")
  moved = {k for k in before if np.any(after[k] != before[k])}
  assert moved - {"classifier/kernel", "classifier/bias"} == {
    f"block_{i}/{part}/kernel"
    for i in range(4)
    for part in ("attention/query", "attention/value", "mlp_in")
  }
  assert tuned.params["positions"].shape == (1, 36, 64)


@pytest.mark.nightly
def test_it_is_exported_converted_and_drawn(tuned):
  images = np.random.default_rng(0).uniform(-1, 1, (2, 24, 24, 3)).astype("f")
  logits = tuned(images)[0]
  exported = jax.export.deserialize(bytearray(tuned.export()))
  np.testing.assert_allclose(exported.call(images), logits, 1e-4, 1e-6)
  convert.convert(tuned, "runs/orbax", "orbax")
  again = vit_jax.load("runs/orbax", verbose=False)
  np.testing.assert_array_equal(again(images)[0], logits)
  for path, to in (("own.npz", "npz"), ("own.safetensors", "timm")):
    with pytest.raises(ValueError, match="expected"):
      convert.convert(tuned, path, to)
    assert not pathlib.Path(path).exists()
  pixels = [np.zeros((24, 24, 3), np.uint8)]
  model = model_figures.inspect_model("own", "own", tuned, pixels, ["black"])
  sections = model_figures.all_sections([model], ChartFiles(), None, 1)
  assert all(x.body and not x.left_out for x in sections[:3]), sections


@pytest.mark.slow
@pytest.mark.parametrize(
  "options, word",
  [
    (["objective.kind=faulty:Mixed"], "faulty.py line"),
    (["objective.kind=faulty:Local"], "over.mean"),
    (["objective.kind=faulty:Disowned"], "own=None"),
    (["objective.kind=faulty:Headed", "objective.is_shared=false"], "scope"),
    (["model.name=faulty:Headless", "objective.kind=classification"], "HEADS"),
  ],
)
def test_what_cannot_work_is_refused(lab, options, word):
  argv = [CONFIG, "--workdir=runs/refused", *(f"--config.{x}" for x in options)]
  with pytest.raises(SystemExit) as error:
    train.main(argv)
  assert "1 error" in str(error.value) and word in str(error.value)
  assert not [*lab.glob("runs/refused/checkpoints/*")]


def test_the_state_is_split_by_the_rules_of_the_family(lab):
  argv = CONFIG, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
  config = cli.parse("plan", {}, argv).config
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:4])
  _, (state, batch) = planner.lower(config, mesh)
  assert batch["views"].shape == (32, 2, 16, 16, 3)
  last = state.memory["cosine"]["last"]
  for tree in (state.params, state.averages["teacher"], last):
    kernel = tree["block_0"]["mlp_in"]["kernel"]
    assert tuple(kernel.sharding.spec) == ("fsdp", "tensor")
