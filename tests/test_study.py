"""The study of docs: every run is there, and the same command goes on."""

import pathlib

import pytest
import study

from vit_jax.config import cli

ROOT = pathlib.Path(__file__).parents[1]


def test_every_run_is_there_once_and_after_the_one_it_starts_from():
  runs = study.grid()
  assert len({run.name for run in runs}) == len({*runs}) == len(runs)
  for i, run in enumerate(runs):
    assert run.init is None or run.init in runs[:i]
  for run in study.grid(seeds=[0])[::4]:
    file = f"{ROOT}/configs/study.py:{run.argument(pathlib.Path('runs'))}"
    assert not cli.parse("x", {}, [f"--config={file}"]).errors


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
  assert lines[pretrained.name]["images_seen"] == 20 * 8
  assert lines[tuned.name]["init"] == pretrained.name
