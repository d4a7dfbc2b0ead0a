"""A whole run, stopped and resumed: its files, scores, costs; what follows."""

import dataclasses
import json
import re
import threading

import jax
import numpy as np
import pytest
from shared_runs import EVALS, OPS, StopAfter, Stopped, config

from vit_jax import evaluate, train
from vit_jax.callbacks import Callback, accounting
from vit_jax.checkpointing import checkpointer
from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.config import freeze
from vit_jax.data import tfds_source
from vit_jax.evaluators.fewshot import Fewshot
from vit_jax.tools.reporting import runs
from vit_jax.writers.metric_writer import is_measured, read_metrics

DIGITS = dict(data__dataset="digits", data__shuffle_buffer=500)


@pytest.mark.slow
def test_files_of_a_run(run):
  metadata = json.loads((run.workdir / "metadata.json").read_text())
  assert metadata["class_names"] == ["blue", "green", "red", "white"]
  assert metadata["grid"] == [2, 2] and metadata["has_cls_row"]
  assert metadata["preprocessing"]["ops"] == OPS
  assert metadata["averages"] == {"few": [run.dataset] * 2}
  written = json.loads((run.workdir / "config.json").read_text())
  assert freeze(written) == run.config()
  # Mistakes, with their images.
  with np.load(run.workdir / "predictions.npz") as saved:
    assert saved["image"].shape == (20, 16, 16, 3)
    assert (saved["num_images"], saved["num_wrong"]) == (20, 1)
    (label,), (answer,) = saved["mistake_label"], saved["mistake_prediction"]
    assert (label, answer) == (2, 0)  # red, blue
    assert 0.25 < saved["mistake_probability"][0] <= 1
    assert saved["mistake_image"].shape == (1, 16, 16, 3)


@pytest.mark.slow
def test_metrics_of_a_run(run):
  rows = read_metrics(str(run.workdir))
  of = lambda key: {r["step"]: r[key] for r in rows if key in r}
  logged = [1, 4, 8, 12, 16, 20]
  assert [*of("train/loss")] == logged
  assert run.writer.logged == [12, 16, 20] and run.writer.is_closed
  assert of("train/loss")[1] == pytest.approx(np.log(4), rel=1e-6)
  assert of("val/top1").keys() == of("a/5shot").keys() == {8, 16, 20}
  assert of("val/top1")[20] == pytest.approx(19 / 20)
  assert of("val/count")[20] == 20
  assert of("train/images_seen") == {step: 16 * step for step in logged}
  flops = run.config().model.train_flops((16, 16), 4)
  exaflops = of("train/exaflops")[20]
  assert exaflops == pytest.approx(320 * flops / 1e18)
  last = {k for r in rows if r["step"] == 20 for k in r}
  assert {"a/random_init/1shot", "a/raw_pixels/5shot"} <= last


@pytest.mark.slow
def test_a_resumed_run_counts_the_costs_of_both_parts(run):
  """The hours of 8 steps and of 12 more, without those that were lost."""
  rows = read_metrics(str(run.workdir))
  costs = [r for r in rows if "train/device_hours" in r]
  hours = {r["step"]: r["train/device_hours"] for r in costs}
  assert list(hours.values()) == sorted(hours.values())
  assert hours[8] <= run.account["device_hours"] < hours[12]
  account = checkpointer.load_metadata(str(run.workdir))["accounting"]
  assert account == account | {
    "images_seen": 320,
    "position": 320,
    "flops": 20 * run.account["flops"] // 8,
    "exaflops": 20 * run.account["flops"] // 8 / 1e18,
    "device_hours": pytest.approx(hours[20], rel=0.1),
    "init": None,
  }
  assert "\ncost        320 images seen, " in run.printed
  # The account of the whole run has the last evaluation and save, too.
  (described,) = runs.find_runs(str(run.workdir))
  assert described.device_hours > account["device_hours"]
  assert sum(described.seconds.values()) > sum(account["seconds"].values())
  # The loop enters every phase, by which waiting for images is measured, too.
  assert all(described.seconds[phase] > 0 for phase in accounting.PHASES)


@pytest.mark.nightly
def test_a_run_that_was_not_stopped_has_the_same_bits_and_rows(run, tmp_path):
  state = train.train_and_evaluate(run.config(), str(tmp_path))
  jax.tree.map(np.testing.assert_array_equal, run.state, state)
  rows = [
    [{k: v for k, v in r.items() if not is_measured(k)} for r in of_run]
    for of_run in map(read_metrics, (str(run.workdir), str(tmp_path)))
  ]
  assert rows[0] == rows[1]


@pytest.mark.slow
def test_evaluate_alone_has_the_scores_of_the_run(run, capsys):
  """The mean of several data sets among them, and none that is not on disk."""
  scores = evaluate.evaluate(run.config(), str(run.workdir))
  rows = [r for r in read_metrics(str(run.workdir)) if r["step"] == 20]
  assert scores == {
    key: value
    for row in rows
    for key, value in row.items()
    if "/" in key and not key.startswith("train/")
  }
  assert scores["few/sets"] == 2 and "pets/5shot" not in scores
  for shots in ("1shot", "5shot"):
    parts = [scores[f"{name}/{shots}"] for name in "ab"]
    assert scores[f"few/{shots}"] == pytest.approx(np.mean(parts))
  printed = capsys.readouterr().out
  assert "step 20: val" in printed
  assert re.search(r"^left out +oxford_iiit_pet: ", printed, re.MULTILINE)
  assert re.search(r"^few +mean of 2 data sets: ", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_finished_run_is_left_alone(run, capfd):
  before = read_metrics(str(run.workdir))
  again = train.train_and_evaluate(run.config(log_steps=5), str(run.workdir))
  metadata = json.loads((run.workdir / "metadata.json").read_text())
  assert metadata["step"] == 20
  assert metadata["accounting"]["images_seen"] == 320
  jax.tree.map(np.testing.assert_array_equal, again.params, run.state.params)
  assert read_metrics(str(run.workdir)) == before
  err = capfd.readouterr().err
  assert "config.log_steps was 4, is now 5" in err
  assert "all 20 steps were done before" in err


@pytest.mark.nightly
def test_resumes_to_the_bit_with_everything_on(tmp_path, monkeypatch):
  """Records from files, averages, microbatches, scan, parameters sharded."""
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  c = config(
    **DIGITS,
    dataset="digits",
    data__ops="decode|resize(20)|pad(2)|random_crop(16)",
    optim__microbatch=2,
    optim__ema_decay=0.9,
    optim__accumulator_dtype="bfloat16",
    mesh__fsdp=4,
    model__depth=2,
    model__scan=True,
    model__remat="full",
    model__stochastic_depth=0.1,
    evals=None,
  )
  whole = train.train_and_evaluate(c, str(tmp_path / "whole"))
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      c, str(tmp_path / "cut"), callbacks=[StopAfter(19)]
    )
  resumed = train.train_and_evaluate(c, str(tmp_path / "cut"))
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)


@dataclasses.dataclass(frozen=True)
class AtStep(Callback):
  step: int
  event: threading.Event

  def on_step(self, step, batch, metrics):
    if step == self.step:
      self.event.set()


@pytest.mark.slow
def test_training_continues_while_the_host_scores(run, tmp_path, monkeypatch):
  """Scores of step 4 that wait for step 7, and are there in checkpoint 8."""
  at_step_7, was_in_time = threading.Event(), []
  score = Fewshot.score

  def slow_score(self, gathered):
    was_in_time.append(at_step_7.wait(60))
    return score(self, gathered)

  monkeypatch.setattr(Fewshot, "score", slow_score)
  few = {**EVALS["b"], "every_steps": 4, "group": None, "l2": (1.0, 64.0)}
  c = run.config(total_steps=12, evals={"few": few})
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      c, str(tmp_path), callbacks=[AtStep(7, at_step_7), StopAfter(9)]
    )
  rows = read_metrics(str(tmp_path))
  assert [r["step"] for r in rows if "few/5shot" in r] == [4]
  train.train_and_evaluate(c, str(tmp_path))
  rows = read_metrics(str(tmp_path))
  assert [r["step"] for r in rows if "few/5shot" in r] == [4, 8, 12]
  assert all("few/l2=64/1shot" in r for r in rows if "few/5shot" in r)
  assert all(was_in_time)


@pytest.mark.parametrize("every, steps", [(0, [8]), (3, [3, 6, 8]), (9, [8])])
def test_steps_with_a_checkpoint(every, steps, tmp_path):
  options = config("x", checkpoint__every_steps=every).checkpoint
  checkpointer = Checkpointer(str(tmp_path), options, total_steps=8)
  assert [s for s in range(1, 9) if checkpointer.is_periodic(s)] == steps
