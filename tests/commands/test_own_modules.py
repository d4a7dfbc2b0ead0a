"""A family, an objective and an evaluator in a folder outside of vit_jax.

`tests/outside` has the modules `my_lab`, and a config that names them.
"""

import json
import pathlib
import subprocess
import sys

import flax
import numpy as np
import pytest
import several
from PIL import Image

import vit_jax
from vit_jax import weights
from vit_jax.commands import evaluate, predict, report, train
from vit_jax.config import build, cli, defaults, freeze
from vit_jax.config.checks import errors
from vit_jax.train import train_and_evaluate
from vit_jax.weights.weights_file import Weights, lazy
from vit_jax.writers.metric_writer import read_metrics

OUTSIDE = pathlib.Path(__file__).parents[1] / "outside"
FAMILY, OBJECTIVE = "my_lab.family:Bags", "my_lab.objective:Focused"
CONFIG = str(OUTSIDE / "my_config.py")


def _forget():
  for name in [n for n in sys.modules if n.partition(".")[0] == "my_lab"]:
    del sys.modules[name]


@pytest.fixture
def lab(monkeypatch):
  """`my_lab` can be imported."""
  monkeypatch.syspath_prepend(str(OUTSIDE))
  yield
  _forget()


def _config(*argv):
  return cli.parse("train", {}, [f"--config={CONFIG}", *argv]).config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of two steps of a config beside `my_lab`."""
  folder = tmp_path_factory.mktemp("outside")
  Image.fromarray(np.full((40, 40, 3), 9, np.uint8)).save(folder / "a.png")
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(OUTSIDE))
    config = _config("--config.model.scale=2")
    train_and_evaluate(config, str(folder / "runs" / "my_config"))
  _forget()
  return folder / "runs" / "my_config"


@pytest.mark.slow
def test_modules_are_found_in_the_current_folder():
  """By the installed script, which has no folder of its own to look in."""
  argv = ["train", "--config=my_config", "--config.model.widht=3"]
  env = {**several.env(), "PYTHONPATH": str(several.ROOT)}
  done = subprocess.run(
    [*several.SCRIPT, *argv],
    cwd=OUTSIDE,
    env=env,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert "config.model.widht: no such option. Did you mean" in done.stderr


@pytest.mark.slow
def test_a_run_and_what_reads_it(run, lab, capsys):
  """Options are typed, and in the config and the metadata under their paths."""
  config = json.loads((run / "config.json").read_text())
  metadata = json.loads((run / "metadata.json").read_text())
  assert metadata["config"]["model"] == config["model"]
  model, objective = config["model"], config["objective"]
  assert (model["name"], model["scale"], model["width"]) == (FAMILY, 2.0, 8)
  assert (objective["kind"], objective["focus"]) == (OBJECTIVE, 0.25)
  # Each kind has its own defaults, although ViT and Focused share the names.
  assert (model["variant"], objective["label_smoothing"]) == ("Bag", 0.125)
  assert config["callbacks"] == ["my_lab.monitor:Scaled(factor=3.0)"]
  losses = [r for r in read_metrics(str(run)) if "train/loss" in r]
  assert len(losses) == 2
  for row in losses:
    assert row["train/scaled"] == pytest.approx(3 * row["train/loss"])
  image = str(run.parents[1] / "a.png")
  other = vit_jax.load(
    str(run), verbose=False, image_size=48, name=FAMILY, scale=1.0
  )
  same = vit_jax.load(str(run), verbose=False, image_size=48)
  assert same.features(image).shape == (1, 8)
  images = np.zeros((2, 48, 48, 3), np.float32)
  np.testing.assert_allclose(same(images)[0], 2 * other(images)[0], rtol=1e-6)
  with pytest.raises(SystemExit, match="^0$"):
    predict.main([str(run), image])
  assert "a.png" in capsys.readouterr().out
  evaluate.main([f"--checkpoint={run}"])
  rows = (run / "evaluation.jsonl").read_text().splitlines()
  assert json.loads(rows[-1])["scores"]["own/count"] == 32


@pytest.mark.slow
def test_a_module_that_is_missing_is_named(run, capsys):
  """To start, resume, load and evaluate; a report needs none."""
  _forget()
  options = json.loads((run / "config.json").read_text())
  for command in (
    lambda: train.main([f"--config={CONFIG}", f"--workdir={run}"]),
    lambda: train_and_evaluate(freeze(options), str(run)),
    lambda: vit_jax.load(str(run)),
    lambda: evaluate.main([f"--checkpoint={run}"]),
  ):
    with pytest.raises((SystemExit, ValueError)) as error:
      command()
    text = f"{error.value} {capsys.readouterr().err}"
    assert "no module 'my_lab'" in text and "PYTHONPATH" in text
  report.main([str(run)])
  assert "Scores" in (run / "report.html").read_text()


OPTIONS = [
  ("model.widht=3", "config.model.widht", "'width'"),
  ("model.width=wide", "config.model.width", "'wide'"),
  ("model.width=0", "config.model.width", "0"),
  ("model.pool=gap", "config.model.pool", "'token' for"),
  ("model.name=my_lab.objective:Focused", "config.model.name", "ModelConfig"),
  ("objective.focus=2", "config.objective.focus", "2.0"),
  ("objective.kind=my_lab.objective:Unstated", "head_loss", "None"),
  ("objective.kind=my_lab.objective:Foc", "config.objective", "no Foc."),
  # Its option is not at its default.
  ("objective.kind=classification", "config.objective.focus", "no such"),
  ("evals.own.power=x", "config.evals.own.power", "'x'"),
]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row[0])
def test_options_are_checked_as_ours_are(lab, row):
  text, *words = row
  argv = [f"--config={CONFIG}", f"--config.{text}"]
  args = cli.parse("train", {}, argv)
  texts = "\n".join(args.errors or errors(args.config))
  assert [word for word in words if word not in texts] == [], texts


def test_kinds_are_chosen_on_the_command_line(lab):
  """In any order; what the config set stays, and defaults are the kind's."""

  def parsed(config, *options):
    argv = [f"--config={config}", *(f"--config.{text}" for text in options)]
    return cli.parse("train", {}, argv)

  family = f"model.name={FAMILY}"
  tiny = pathlib.Path(__file__).parents[1] / "tiny_run.py"
  errors = str(parsed(tiny, "model.width=5", family).errors)
  assert "config.model.depth: got 1, expected None for" in errors
  args = parsed(tiny, f"objective.kind={OBJECTIVE}")
  options = args.config.objective  # ours are "softmax" and 0
  assert (options.loss, options.label_smoothing) == (1.0, 0.125)
  # Back to a kind of ours: defaults of the other kind are left behind.
  c = defaults()
  for kind, smoothing in ((OBJECTIVE, 0.125), ("classification", 0.0)):
    c.objective.kind = kind
    assert c.objective.label_smoothing == smoothing
    assert freeze(c).objective.label_smoothing == smoothing


def test_options_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  frozen = "@dataclasses.dataclass(frozen=True)"
  for name, decorator, kind, words in (
    ("bare", "", "float", "option 'focus' is no field of a frozen dataclass"),
    ("tuples", frozen, "tuple", "has the type <class 'tu"),
    ("absent", frozen, "'Absent'", "has the type Absent"),
  ):
    (tmp_path / f"{name}.py").write_text(
      "import dataclasses\n"
      "from vit_jax.objectives import Classification\n"
      "from vit_jax.options import option\n"
      f"{decorator}\n"
      "class Own(Classification):\n"
      f"  focus: {kind} = option(0.5, 'a share')\n"
    )
    _, (text,) = build({"objective": {"kind": f"{name}:Own"}})
    assert words in text


def test_parameters_of_an_own_objective_begin_anew_or_are_left_out(lab):
  """`Objective.own` of the model, and that of the file in its metadata."""
  model = freeze({"model": {"name": FAMILY}}).model
  arrays = {"stem/kernel": np.ones((8, 8, 3, 16)), "stem/bias": np.zeros(16)}
  decoder = {"decoder/kernel": np.zeros((16, 4))}

  def adapted(file, target, metadata, own):
    read = {k: lazy(np.float32(v)) for k, v in file.items()}
    file = Weights("file", "checkpoint", read, metadata=metadata)
    nested = flax.traverse_util.unflatten_dict(target, sep="/")
    return weights.adapt(file, nested, model, (32, 32), own=own)

  own = "decoder/"
  params, report = adapted(arrays, arrays | decoder, {}, own)
  assert params["decoder"] == {"kernel": None}
  assert report.reinitialised == ("decoder/kernel",)
  params, _ = adapted(
    arrays | decoder, arrays, {"objective_parameters": own}, None
  )
  assert "decoder" not in params
