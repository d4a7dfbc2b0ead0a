"""What is compiled beforehand is all that a run compiles."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny
from compiled import Compiled
from planning.test_planner import PLAN, needs_libtpu

from vit_jax import sharding, train
from vit_jax.config import Config
from vit_jax.tools.planning import planner, programs
from vit_jax.tools.planning.plan import table

SPLIT = {"split": "test[:20]", "ops": "decode|resize(16)"}
LEARNS = {**SPLIT, "train_split": "train[:40]"}
FEW = {"kind": "fewshot", "shots": (1,), "l2": (1.0,), **LEARNS}
EVALS = {
  "test": {"kind": "classification", **SPLIT},
  "each": {"kind": "per_class", **SPLIT},
  "map": {"kind": "multilabel", **SPLIT},
  "few": {**FEW, "baselines": True},
  "same": {**FEW, "dataset": "digits"},
  "near": {"kind": "knn", "ks": (1, 3), **LEARNS},
  "heads": {"kind": "linear", "steps": 3, "lrs": (0.1,), **LEARNS},
}
OWN = {**SPLIT, "kind": "classification", "dataset": "mine"}


def _config(**changes) -> Config:
  options = dict(total_steps=2, data__dataset="digits", evals=EVALS)
  return tiny.config(**options | changes)


def _programs(config, devices=1):
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:devices])
  known = planner.with_length(planner.run_shape_of(config))
  return programs.programs(config, known, mesh)


@pytest.mark.nightly
def test_a_run_compiles_nothing_else(tmp_path):
  config = _config()
  named, *_ = _programs(config)
  with tiny.devices(1), Compiled() as compiled:
    train.train_and_evaluate(config, str(tmp_path))
  assert set(compiled.names) == {program.fn.__name__ for program in named}


def test_the_state_stays_beside_an_evaluation():
  """The parameters of the program are those of the state."""
  config = _config(mesh__fsdp=2, optim__ema_decay=0.9)
  by_name = {p.name: p for p in _programs(config, devices=2)[0]}
  state, batch = by_name["train_step"].arguments
  params, images = by_name["test/sums"].arguments
  half = sum(
    x.size // (1 if x.sharding.is_fully_replicated else 2) * x.dtype.itemsize
    for x in jax.tree.leaves(state)
  )
  assert programs.per_device(state) == half
  assert params is state.averages["ema"]
  waiting = programs.per_device(batch) + programs.per_device(images)
  beside = half - programs.per_device(params) + waiting
  assert by_name["test/sums"].beside == beside
  rows = config.data.batch_size // 2
  assert programs.per_device(batch) == rows * (16 * 16 * 3 + 4 + 1 + 4)


def test_what_does_not_fit_beside_the_state():
  one = jax.ShapeDtypeStruct((250,), jnp.float32)
  add = jax.jit(lambda x: x + 1)
  names = {"digest a": 0, "digest b": 1, "features": 3000}
  listed = [programs.Program(k, add, (one,), n) for k, n in names.items()]
  first, _, last = rows = list(programs.compiled(listed, capacity=3000))
  assert first["fits"] and 2000 <= first["peak_bytes"] <= 3000
  assert last["peak_bytes"] == first["peak_bytes"] + 3000
  assert not last["fits"]

  class Full:
    def lower(self, x):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")

  too_large = programs.Program("sums", Full(), (one,), 0)
  rows += programs.compiled([too_large], capacity=3000)
  unknown = {"peak_bytes": None, "seconds": None}
  assert rows[-1] == {"name": "sums", "fits": False, **unknown}
  known = {"capacity_bytes": 3000, "peak_bytes": 2000, "fits": False}
  text = table({**PLAN, **known, "programs": rows, "left_out": ["own: why"]})
  assert "A PROGRAM DOES NOT FIT" in text
  digests, features, sums, left_out = text.splitlines()[-4:]
  assert "2 kinds" in digests and "NOT FIT" not in digests
  assert "features: 0.00 GiB, DOES NOT FIT" in features
  assert "even alone" in sums and left_out.endswith("own: why")


def test_evaluations_count_by_their_batches_and_times():
  """Each program is listed once; what is unknown is noted."""
  evals = {name: dict(options) for name, options in EVALS.items()}
  evals["test"]["every_steps"] = 30
  evals["few"]["shots"], evals["few"]["seeds"] = (1, 3), (0, 1)
  evals["map"]["split"] = evals["near"]["split"] = "nowhere"
  evals["own"] = OWN
  config = _config(data__batch_size=16, total_steps=100, evals=evals)
  listed, passes, notes = _programs(config)
  of_map, of_near, of_own = notes
  assert of_map.startswith("map: ") and of_own.startswith("own: ")
  assert of_near.startswith("near: ") and "programs of one device" in of_near
  assert [program.name for program in listed] == [
    *("init", "train_step", "schedule", "test/sums", "test/answers"),
    *("each/sums_and_answers", "each/answers", "map/ranked", "map/answers"),
    *("few/features", "few/pixels", "few/random_init"),
    "heads/heads of 3 steps",
  ]
  by_name = {p.name: p for p in passes}
  # 20 images in batches of 16; at steps 30, 60, 90 and at the end.
  assert by_name["test"][1:] == ("test/sums", 20, 2, 4)
  # 3 of each of 10 classes, twice, are more than the 40 that there are.
  # No batch has images of both splits: 40 make 3 batches, and 20 make 2.
  assert by_name["few"][1:] == ("few/features", 40 + 20, 5, 1)
  assert by_name["same"][1:] == ("few/features", 3 * 10 + 20, 4, 1)
  assert {p.program for p in passes} < {program.name for program in listed}

  rows = [{"name": p.name, "seconds": 0.5} for p in listed]
  shares = programs.evaluation(passes, rows, run_seconds=100.0)
  assert shares["test"] == 4 * 2 * 0.5 / 100
  assert shares["same"] == 4 * 0.5 / 100
  text = table({**PLAN, "evaluation": {"a": 0.01, "b": 0.002}})
  assert "evaluation  1.20 % " in text and " a (1.00 %)" in text


@pytest.mark.nightly
@needs_libtpu
def test_all_of_a_run_is_compiled_for_a_slice():
  code = (
    "import json, tiny; from vit_jax.tools.planning import planner;"
    "from vit_jax.config import defaults, freeze, to_dict;"
    "c = defaults();"
    "c.update(to_dict(tiny.config(data__dataset='cifar10', mesh__fsdp=2)));"
    "c.evals = {'t': {'kind': 'classification', 'ops': 'decode|resize(16)',"
    "'split': 'test'}};"
    "c.evals |= {k: c.evals['t'] | {'kind': k} for k in ('knn', 'linear')};"
    "c = freeze(c);"
    "f = planner.plan(c, 'v5e:2x2');"
    "print(json.dumps(f | planner.plan_programs(c, 'v5e:2x2', f)))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    env={"PYTHONPATH": "tests:.", "PATH": "", "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stderr
  plan = json.loads(done.stdout)
  names = [row["name"] for row in plan["programs"]]
  assert names[:3] == ["train_step", "init", "schedule"]
  # On one chip; 12,500 steps come 512 at a time, and the rest.
  of_one = {
    "knn/nearer",
    "linear/heads of 212 steps",
    "linear/heads of 512 steps",
  }
  assert {"t/sums", "t/answers", "knn/features"} | of_one < set(names)
  assert sum(name.startswith("digest ") for name in names) > 5
  assert plan["fits"] and all(row["fits"] for row in plan["programs"])
  # 10,000 images forward at the end, after 20 steps of 16 with two passes more.
  assert 1 < plan["evaluation"]["t"] < 100
