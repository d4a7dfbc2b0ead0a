"""The study: what it runs, that it goes on, and what its file says."""

import importlib.util
import itertools
import json
import pathlib
import sys

import pytest

from vit_jax.config import cli

ROOT = pathlib.Path(__file__).parents[1]


def _load(name):
  path = ROOT / "benchmarks" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # where dataclasses look
  spec.loader.exec_module(module)
  return module


study = _load("study")


def _model(run):
  argument = run.argument(pathlib.Path("runs"))
  args = cli.parse("x", {}, [f"--config={ROOT}/configs/study.py:{argument}"])
  assert not args.faults
  return args.config.model


def test_every_run_is_there_once_and_after_the_one_it_starts_from():
  runs = study.grid()
  names = [run.name for run in runs]
  assert len(set(names)) == len(runs) == 3 * len(study.grid(seeds=[0]))
  for i, run in enumerate(runs):
    assert run.init is None or run.init in runs[:i]


@pytest.mark.parametrize("size", ["small", "medium"])
def test_families_are_compared_at_equal_compute(size):
  """Forward multiply-adds of a size differ by less than 10 %."""
  macs = [
    _model(study.Run(f"{family}-{size}", 0)).forward_macs((32, 32), 92)
    for family in study.FAMILIES
  ]
  assert max(macs) < 1.1 * min(macs)


def test_the_points_of_a_figure_differ_in_one_thing():
  runs = study.grid(seeds=[0])
  for a, b in itertools.combinations(runs, 2):
    assert a != b
  supervised = [r for r in runs if r.task == "glyphs"]
  smaller = {r.images for r in supervised if r.steps == study.STEPS[-1]}
  assert smaller == set(study.IMAGES)
  assert {r.posemb for r in runs if r.model != "vit-small"} == {"learn"}


def test_what_has_a_line_is_not_run_again(tmp_path):
  results = tmp_path / "study.jsonl"
  runs = study.grid(seeds=[0])
  lines = "".join(json.dumps({"name": run.name}) + "\n" for run in runs)
  results.write_text(lines)
  study.study(runs, results, tmp_path / "runs")
  assert results.read_text() == lines and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_same_command_goes_on(tmp_path):
  """A run is made anew where only its weights are missing, without a line."""
  results = tmp_path / "study.jsonl"
  pretrained = study.Run("vit-small", seed=1, images=640, steps=20)
  tuned = study.Run("vit-small", seed=1, task="digits", init=pretrained)
  flags = ["--config.fake_data=True", "--config.data.batch_size=8"]
  study.study([pretrained], results, tmp_path / "a", flags)
  first = results.read_text()
  flags += ["--config.optim.warmup_steps=1", "--config.total_steps=2"]
  study.study([pretrained, tuned], results, tmp_path / "b", flags)
  assert results.read_text().startswith(first)
  lines = study.read(results)
  assert list(lines) == [pretrained.name, tuned.name]
  line = lines[pretrained.name]
  assert line["images_seen"] == 20 * 8
  macs = _model(pretrained).forward_macs((32, 32), 92)
  assert line["train_flops"] == 6 * macs * 20 * 8
  assert 0 <= line["scores"]["fewshot/10shot"] <= 1
  assert {"digits/top1", "val/top1"} <= set(lines[tuned.name]["scores"])
  assert lines[tuned.name]["init"] == pretrained.name
