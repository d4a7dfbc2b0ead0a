"""Every config passes its checks, equals its golden text, has a model.

After a wanted change, `PYTHONPATH=.:tests python tests/config/test_configs.py`
writes the golden texts. Their keys are the arguments that are tested.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import flax
import numpy as np
import pytest
import several
import tiny
from commands.converting import make

from vit_jax import experiment, families, run_checks, weights
from vit_jax.config import checks, cli, to_dict
from vit_jax.data.preprocessing import image_size
from vit_jax.models import build
from vit_jax.tools.exporting import convert
from vit_jax.writers.metric_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"

# Every config, with the arguments whose options its golden text has.
ARGUMENTS = {
  p.stem: [*json.loads(p.read_text())] for p in sorted(GOLDEN.glob("*.json"))
}
CASES = [(name, arg) for name, args in ARGUMENTS.items() for arg in args]
# Models whose shapes take seconds.
LARGE = re.compile(r"_[lh]|[LH]/|R[0-9]+[+]|R152|dinov2")
# Folders of images, and how many each class has there.
IMAGES = {
  "images": 200,
  **{"split/train": 90, "split/val": 9, "split/test": 9},
}


def _is_first(name, argument):
  """Whether it is the first small model of its config."""
  small = (a for a in ARGUMENTS[name] if not LARGE.search(f"{name}:{a}"))
  return argument == next(small, None)


def _load(name, argument):
  colon = ":" if argument else ""
  file = ROOT / "configs" / f"{name}.py"
  return cli.parse("x", {}, [f"--config={file}{colon}{argument}"])


def _module(name):
  path = ROOT / "configs" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _golden(name):
  """All options of a config, for each of its arguments."""
  values = {a: to_dict(_load(name, a).config) for a in ARGUMENTS[name]}
  return json.dumps(values, indent=1) + "\n"


def _make_files(folder):
  """Makes what `ARGUMENTS` name: images (never opened), a CSV, weights."""
  for name, count in IMAGES.items():
    for label in ("cat", "dog"):
      (folder / name / label).mkdir(parents=True)
      for i in range(count):
        (folder / name / label / f"{i}.jpg").touch()
  lines = ["id,kind,a,b,size"]  # one class, several, or a number
  for i in range(40):
    kind = ("cat", "dog")[i % 2]
    lines.append(f"images/{kind}/{i}.jpg,{kind},{i % 2},{i % 3 // 2},{i}")
  (folder / "table.csv").write_text("\n".join(lines))
  for name, depth in (("weights", 2), ("deep", 4)):
    model = build(tiny.config(model__depth=depth).model, 10)
    params = tiny.shapes(model, (1, 48, 48, 3))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    arrays = {key: np.zeros(x.shape, x.dtype) for key, x in flat.items()}
    np.savez(folder / f"{name}.npz", **arrays)


@contextlib.contextmanager
def _files():
  with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
    _make_files(pathlib.Path(name))
    yield


@pytest.fixture(scope="module", autouse=True)
def _where_files_are():
  with _files():
    yield


def _advertised():
  """Every config with every value in its tables, or docstring."""
  datasets = [*_module("finetune").DATASETS]
  datasets[datasets.index("folder")] = "folder:images"
  of_values = {
    "comparison": {
      "model": _module("comparison").LEARNING_RATES,
      "dataset": _module("comparison").EPOCHS,
    },
    "finetune": {"model": families.PUBLISHED, "dataset": datasets},
    "vtab": {"task": _module("vtab").TASKS},
    "mae_finetune": {"model": _module("mae_finetune").MODELS},
    "vit_s16": {"head": _module("vit_s16").HEADS, "epochs": (90, 300)},
  }
  for name, values in of_values.items():
    for chosen in itertools.product(*values.values()):
      pairs = zip(values, chosen, strict=True)
      yield name, ",".join(f"{key}={value}" for key, value in pairs)
  for name, values in _module("augreg").CHOICES.items():  # each of them once
    for value in values:
      yield "augreg", f"{name}={value}"
      if name != "dataset":
        yield "augreg", f"dataset=imagenet2012,{name}={value}"
  for stage, models in _module("deit3").STAGES.items():
    yield from (("deit3", f"stage={stage},model={model}") for model in models)
  yield from (c for c in CASES if c[0] not in (*of_values, "dinov2"))


def _without_disk(name, argument):
  """The config of a run on fake data that starts from scratch."""
  args = _load(name, argument)
  is_there = name in ("folder", "unlabelled")  # their data and weights
  config = dataclasses.replace(
    args.config,
    fake_data=not is_there,
    init=args.config.init if is_there else None,
  )
  return config, args.errors


def test_every_config_is_tested():
  assert {p.stem for p in (ROOT / "configs").glob("*.py")} == set(ARGUMENTS)


def _errors(name, argument):
  """What can be said of a recipe without the shapes of its model."""
  config, errors = _without_disk(name, argument)
  run = experiment.Experiment(config)
  return [
    *errors,
    *checks.errors(config),
    *run_checks.mesh_errors(config),
    *itertools.chain(*run_checks.data_errors(run).values()),
    *run_checks.length_and_head_errors(run),
  ]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_golden_text(name):
  assert _golden(name) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize(
  "name, argument",
  [
    pytest.param(
      *c, marks=pytest.mark.slow if _is_first(*c) else pytest.mark.nightly
    )
    for c in CASES
    if "gram=" not in c[1]  # tests/self_supervised/test_dinov2.py
  ],
)
def test_passes_preflight(name, argument):
  config, errors = _without_disk(name, argument)
  run_checks.setup(config, errors=errors)


@pytest.mark.nightly
def test_all_that_is_advertised_can_start():
  """But for the shapes of models, which take seconds each."""
  wrong = {case: errors for case in _advertised() if (errors := _errors(*case))}
  assert not wrong


def test_folder_trains_wide_models_at_a_lower_rate_and_shorter(monkeypatch):
  load = lambda: _load("folder", "path=images,init=weights.npz").config
  small = load()
  # The file has no name for its size: B, and what differs from it.
  assert small.model == dataclasses.replace(tiny.config().model, variant="B/8")
  model = dataclasses.replace(tiny.config().model, width=384)
  monkeypatch.setattr(weights, "model_to_finetune", lambda _: model)
  wide = load()
  assert (small.optim.lr, wide.optim.lr) == (0.03, 0.003)
  # 288 of 400 images are trained on, by 8.
  assert (small.total_steps, wide.total_steps) == (60 * 36, 40 * 36)


def test_folder_tries_options_for_classes_alone():
  get_trials = _module("folder").get_trials
  for columns in ("labels=kind", "labels=a,b", "numbers=size"):
    rounds, _ = get_trials(f"path=table.csv,{columns},init=weights.npz")
    assert (rounds is not None) == (columns == "labels=kind")


def test_too_few_images_to_hold_some_out_are_said(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "0.png").touch()
  with pytest.raises(SystemExit, match=f"path: got 2 images .*{tmp_path}"):
    _load("folder", f"path={tmp_path}")


@pytest.mark.slow
def test_finetune_takes_the_model_from_the_weights(tmp_path):
  """A DINOv2 of timm's, of which no name states the parts."""
  options = dict(name="modern", variant="S/14", registers=2, layer_scale=0.1)
  options |= dict(width=32, depth=2, mlp_dim=64, num_heads=4)
  vit = make(0, (70, 70), None, **options)
  path = tmp_path / "model.safetensors"
  convert.convert(vit, str(path), "timm")
  args = _load("finetune", f"init={path},dataset=cifar10")
  config = args.config
  assert dataclasses.replace(config.model, dtype="float32") == (
    weights.model_to_finetune(weights.read(path))
  )
  assert config.model.name == "modern" and config.model.registers == 2
  assert image_size(config.data.ops) == (378, 378)
  config = dataclasses.replace(config, fake_data=True)
  run = run_checks.setup(config, errors=args.errors)
  _, report = run.fitted_weights()
  assert not report.ignored
  assert {*report.reinitialised} == {"head/kernel", "head/bias"}


def test_grids_of_table_4():
  get_grid, args = _module("finetune").get_grid, "dataset=imagenet2012,model="
  assert get_grid() == {"optim.lr": (0.001, 0.003, 0.01, 0.03)}
  assert get_grid(args + "L/16") == {"optim.lr": (0.003, 0.01, 0.03)}
  for model in ("R50x1", "R50+B/16"):
    assert get_grid(args + model) == {"optim.lr": (0.003, 0.01, 0.03, 0.06)}


def test_tasks_of_vtab():
  module = _module("vtab")
  assert module.get_tasks("task=dtd") == {}
  tasks = module.get_tasks("task=all,model=B/32")
  assert list(tasks) == list(module.TASKS)
  group, argument = tasks["eurosat"]
  assert group == "specialized"
  assert argument == "task=eurosat,init=,model=B/32,res=384"
  assert len(module.get_tasks("task=structured")) == 8
  for task in module.TASKS:
    ops = module.get_config(f"task={task}").data.ops
    is_left_as_it_is = module.TASKS[task].group == "structured"
    assert ("flip_lr" in ops) != (is_left_as_it_is or task == "svhn")


# A recipe with its arguments, the one that the error names, and a key word.
WRONG = """
vit_b16:imagnet2012                  | 'imagenet2012'
finetune:res=big                     | res: got big
finetune:budget=5m                   | init: got none
finetune:init=none.npz               | init: got 'none.npz'
finetune:model=C/16                  | size: got 'C'
vtab:task=all                        | for vit-jax sweep alone
vtab:task=nature                     | 'natural'
augreg:aug=light0                    | aug: got 'light0'
ablation:model=R50x1,pool=gap        | for Transformers alone
deit3:stage=i1k_224,model=S/16       | one of B/16, L/16, H/14
probes:version=3                     | weights=FILE
distill:model=S/16                   | teacher=WEIGHTS
mae_finetune:model=S/16              | model: got 'S/16'
folder:init=weights.npz              | path=/path/to/images
folder:path=nothing                  | TFDS
folder:path=nothing.csv              | nothing.csv: got no file
folder:path=images,labels=a          | labels: got 'a'
folder:path=csv:none.csv,labels=a    | /none.csv: got no file
folder:path=images,init=none.npz     | init: got 'none.npz'
folder:path=images,init=weights.npz,model=S/16 | model: got S/16
study:init=runs/x                    | init with task=glyphs
glyphs:x                             | no argument
""".strip().split("\n")


@pytest.mark.parametrize("row", WRONG)
def test_arguments_that_are_wrong(row):
  recipe, word = map(str.strip, row.split("|"))
  name, _, argument = recipe.partition(":")
  with pytest.raises(SystemExit) as e:
    _load(name, argument)
  file = ROOT / "configs" / f"{name}.py"
  assert f"  - --config={file}:{argument}: " in str(e.value)
  assert word in str(e.value)


# Runs on fake data, through the command line.

# They compile for a minute or two each.
RECIPES = (
  "finetune.py:model=B/16,dataset=cifar10,res=384",
  "vit_b16.py:imagenet2012",
  "ablation.py:posemb=learn2d,posemb_at=blocks",
  "ablation.py:model=R50x1,optimizer=sgd",
  "augreg.py:model=B/16,aug=medium1,reg=0.1,dataset=imagenet21k",
  "vit_s16.py:epochs=300",
  "deit3.py:stage=i1k,model=S/16",
  "deit3.py:stage=i1k_384,model=B/16",
  "mae_finetune.py:model=B/16",
  "masked_patch.py:imagenet2012,target=small,steps=100000",
)


@pytest.mark.nightly
@pytest.mark.parametrize("source", RECIPES)
def test_recipe_on_fake_data(source, tmp_path):
  """Two steps of the whole width; two blocks stand for the others."""
  command = [sys.executable, "-m", "vit_jax.train", "--fake_data"]
  command += [f"--config=configs/{source}", f"--workdir={tmp_path}"]
  command += ["--config.data.batch_size=4", "--config.total_steps=2"]
  command += ["--config.optim.warmup_steps=1"]
  if "R50" not in source:
    command.append("--config.model.depth=2")
  options = dict(capture_output=True, text=True, cwd=several.ROOT)
  done = subprocess.run(command, env=several.env(), **options)
  assert done.returncode == 0, done.stderr
  rows = read_metrics(str(tmp_path))
  assert np.isfinite([r["train/loss"] for r in rows if "train/loss" in r]).all()
  evals = json.loads((tmp_path / "config.json").read_text())["evals"].values()
  scores = {k: v for r in rows for k, v in r.items() if k.endswith("/count")}
  assert set(scores.values()) <= {8}
  assert len(scores) == sum(e["kind"] == "classification" for e in evals)
  sets = sum(e["kind"] == "fewshot" for e in evals)
  assert rows[-1].get("fewshot/sets", 0) == sets


if __name__ == "__main__":
  with _files():
    for config_name in ARGUMENTS:
      (GOLDEN / f"{config_name}.json").write_text(_golden(config_name))
