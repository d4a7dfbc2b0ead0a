"""The study: what it runs, that it goes on, and what its file says."""

import itertools
import pathlib

import pytest
import study
import study_report as report

from vit_jax.config import cli

ROOT = pathlib.Path(__file__).parents[1]


def _lines(score, seeds=study.SEEDS):
  """Lines of all runs of these seeds, with scores by a function of the run."""
  lines = {}
  for run in study.grid(seeds):
    argument = run.argument(pathlib.Path("runs"))
    lines[run.name] = {
      "name": run.name,
      "scores": dict.fromkeys(
        ("fewshot/10shot", "glyphs/top1", "digits/top1"), score(run)
      )
      | {
        "fewshot/random_init/10shot": 0.1,
        "fewshot/raw_pixels/10shot": 0.2,
      },
      "config": argument,
      "train_flops": run.steps * 10**9,
      "cpu_seconds": 60.0,
      "seconds": 30.0,
      "machine": "abacus",
      "commit": "0123456789",
      "versions": {"jax": "1.0"},
    }
  return lines


def _model(run):
  argument = run.argument(pathlib.Path("runs"))
  args = cli.parse("x", {}, [f"--config={ROOT}/configs/study.py:{argument}"])
  assert not args.errors
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


def test_tables_have_mean_and_deviation_over_the_seeds():
  lines = _lines(lambda run: 0.5 + 0.1 * run.seed)
  assert report.cell([50.0, 60.0, 70.0]) == "60.0 ± 10.0"
  for name, made in report.TABLES.items():
    if name not in ("cost", "baselines"):
      assert made(lines).count("60.0 ± 10.0") >= 5, name
  assert "| none | 10.0 ± 0.0 | 60.0 ± 10.0 |" in report.pretraining(lines)
  runs = len(study.grid())
  assert report.cost(lines).startswith(f"{runs} of {runs} runs, ")
  assert f"{runs} minutes of processor time, {runs // 2} on" in report.cost(
    lines
  )


def test_every_run_is_in_a_table():
  """A table that is made without a run says that this one is missing."""
  lines = _lines(lambda run: 0.5)
  complete = {name: made(lines) for name, made in report.TABLES.items()}
  assert not any("of 2)" in table for table in complete.values())
  for run in study.grid(seeds=[1]):
    others = {k: v for k, v in lines.items() if k != run.name}
    tables = [made(others) for made in report.TABLES.values()]
    assert any("(of 2)" in table for table in tables), run


@pytest.mark.nightly
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


def test_augreg_in_miniature_is_augreg_on_small_photographs(tmp_path):
  for name in ("cat", "dog"):
    (tmp_path / "train" / name).mkdir(parents=True)
  file = f"{ROOT}/benchmarks/augreg_small.py:path={tmp_path}"
  args = cli.parse("x", {}, [f"--config={file},aug=medium1"])
  assert not args.errors
  config = args.config
  expected = "decode_inception_crop(224)|flip_lr|randaug(2, 15)|resize(32)"
  assert config.data.ops == expected
  assert (config.objective.loss, config.objective.mixup) == ("sigmoid", 0.2)
  assert (config.model.patch, config.model.size.width) == (4, 128)
