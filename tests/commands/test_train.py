"""Whole runs: train, stop, resume, evaluate, fine-tune."""

import json
import pathlib
import re
import threading
import time

import jax
import numpy as np
import pytest
import tiny

from vit_jax import evaluate as evaluate_lib
from vit_jax import train
from vit_jax.callbacks import Callback, accounting
from vit_jax.checkpointing import checkpointer
from vit_jax.checkpointing.checkpointer import Checkpointer
from vit_jax.config import Config, ConfigError, defaults, freeze, to_dict
from vit_jax.data import tfds_source
from vit_jax.evaluators.fewshot import Fewshot
from vit_jax.tools.reporting import runs
from vit_jax.writers.metric_writer import is_measured, read_metrics

OPS = "decode|resize(16)"
EVALS = {
  "test": {
    "kind": "classification",
    "split": "test[:100]",
    "ops": OPS,
    "every_steps": 8,
  },
  "few": {
    "kind": "fewshot",
    "ops": OPS,
    "train_split": "train[:160]",
    "split": "test[:100]",
    "shots": (1, 5),
    "l2": (1.0, 64.0),
    "baselines": True,
  },
}


def _config(**changes) -> Config:
  """20 steps on real digits; a checkpoint every 8."""
  c = defaults()
  c.update(to_dict(tiny.config()))
  c.data.dataset = "digits"
  c.data.shuffle_buffer = 500
  c.checkpoint.every_steps = 8
  c.log_steps = 4
  c.model.depth, c.model.dropout = 1, 0.1
  c.evals = EVALS
  tiny.apply(c, changes)
  return freeze(c)


class Losses:
  """A writer of somebody else."""

  def __init__(self):
    self.steps, self.is_closed = [], False

  def write_scalars(self, step, scalars):
    self.steps += [step] * ("train/loss" in scalars)

  def flush(self):
    pass

  def close(self):
    self.is_closed = True


LOSSES = Losses()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("run"))
  return workdir, train.train_and_evaluate(_config(), workdir, writer=LOSSES)


class Stopped(Exception):
  """Stands for a machine that is taken away."""


class StopAfter(Callback):
  """Ends the run after so many steps, before anything of them is written."""

  def __init__(self, steps):
    self._steps = steps

  def on_step(self, step, batch, metrics):
    if step == self._steps:
      raise Stopped


def _assert_same_bits(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_files_of_a_run(run):
  workdir, state = run
  assert int(state.step) == 20
  folder = pathlib.Path(workdir)
  metadata = json.loads((folder / "metadata.json").read_text())
  assert metadata["class_names"] == [str(i) for i in range(10)]
  assert metadata["grid"] == [2, 2] and metadata["has_cls_row"]
  assert metadata["preprocessing"]["ops"] == OPS
  # The account of the whole run, that with the last evaluation and save.
  (described,) = runs.find_runs(workdir)
  saved = checkpointer.load_metadata(workdir)
  assert described.device_hours == metadata["accounting"]["device_hours"]
  assert described.device_hours > saved["accounting"]["device_hours"]
  assert sum(described.seconds.values()) > sum(
    saved["accounting"]["seconds"].values()
  )
  # The loop enters every phase, by which waiting for images is measured, too.
  assert all(described.seconds[phase] > 0 for phase in accounting.PHASES)
  config = freeze(json.loads((folder / "config.json").read_text()))
  assert config == _config()
  with np.load(folder / "predictions.npz") as saved_images:
    assert saved_images["image"].shape == (64, 16, 16, 3)
    assert saved_images["probability"].max() <= 1
    assert (
      saved_images["num_images"] == 100 and 0 < saved_images["num_wrong"] < 100
    )
    assert len(saved_images["mistake_image"]) == min(
      24, saved_images["num_wrong"]
    )
    assert (
      saved_images["mistake_label"] != saved_images["mistake_prediction"]
    ).all()
    assert (np.diff(saved_images["mistake_probability"]) <= 0).all()


@pytest.mark.slow
def test_metrics_of_a_run(run):
  rows = read_metrics(run[0])
  logged = [r["step"] for r in rows if "train/loss" in r]
  assert logged == LOSSES.steps == [1, 4, 8, 12, 16, 20] and LOSSES.is_closed
  assert [r["step"] for r in rows if "test/top1" in r] == [8, 16, 20]
  assert [r["step"] for r in rows if "few/5shot" in r] == [20]
  assert all(r["test/count"] == 100 for r in rows if "test/count" in r)
  first = next(r for r in rows if r["step"] == 1)
  assert first["train/loss"] == pytest.approx(np.log(10), rel=1e-6)
  assert "train/images_per_second" in rows[-3]
  seen = {r["step"]: r["train/images_seen"] for r in rows if "train/lr" in r}
  assert seen == {step: 16 * step for step in logged}
  flops = _config().model.train_flops((16, 16), 10)
  assert rows[-3]["train/exaflops"] == pytest.approx(320 * flops / 1e18)
  assert {"few/random_init/1shot", "few/raw_pixels/5shot"} <= rows[-1].keys()


@pytest.fixture
def cache_of_all():
  """Programs are cached however quickly they compile."""
  before = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  yield
  jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.slow
def test_resumed_run_ends_in_the_same_bits(run, tmp_path, cache_of_all, capfd):
  """Compiled by the uninterrupted run, read from the cache by the resumed."""
  workdir, state = run
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      _config(), str(tmp_path), callbacks=[StopAfter(12)]
    )
  assert checkpointer.find(str(tmp_path)).name == "8"
  cost = checkpointer.load_metadata(str(tmp_path))["accounting"]
  capfd.readouterr()
  resumed = train.train_and_evaluate(_config(), str(tmp_path))
  err = capfd.readouterr().err
  assert "\ncost        320 images seen, " in err
  # The hours of 8 steps, and of 12 more: more than either, and than the lost.
  costs = [r for r in read_metrics(str(tmp_path)) if "train/device_hours" in r]
  hours = [r["train/device_hours"] for r in costs]
  assert hours == sorted(hours) and [r["step"] for r in costs][1:4] == [
    4,
    8,
    12,
  ]
  assert hours[2] <= cost["device_hours"] < hours[3]
  account = checkpointer.load_metadata(str(tmp_path))["accounting"]
  assert account == account | {
    "images_seen": 320,
    "position": 320,
    "flops": 20 * cost["flops"] // 8,
    "exaflops": 20 * cost["flops"] // 8 / 1e18,
    "device_hours": pytest.approx(hours[-1], rel=0.1),
    "init": None,
  }
  (line,) = re.findall("^start  .*", err, re.MULTILINE)
  assert re.fullmatch(
    r"start +\d+\.\d s to the end of the first step: checks .*, model"
    r" and state .*, evaluators .*, first batch .*, first step \d+\.\d \(cache"
    r" hit, /.*/xla\)",
    line,
  )
  _assert_same_bits(resumed, state)
  same = lambda rows: [
    {k: v for k, v in r.items() if not is_measured(k)} for r in rows
  ]
  assert same(read_metrics(str(tmp_path))) == same(read_metrics(workdir))


@pytest.mark.slow
def test_resumes_to_the_bit_with_everything_on(tmp_path, monkeypatch):
  """Records from files, averages, microbatches, scan, parameters sharded."""
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  config = _config(
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
  whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      config, str(tmp_path / "cut"), callbacks=[StopAfter(19)]
    )
  resumed = train.train_and_evaluate(config, str(tmp_path / "cut"))
  _assert_same_bits(resumed, whole)


@pytest.mark.slow
def test_training_continues_while_the_host_scores(tmp_path, monkeypatch):
  """Scores of step 4 that take until step 7, and are there in checkpoint 8."""
  at_step_7, was_in_time = threading.Event(), []
  score = Fewshot.score

  class AtStep7(Callback):
    def on_step(self, step, batch, metrics):
      if step == 7:
        at_step_7.set()

  def slow_score(self, gathered):
    was_in_time.append(at_step_7.wait(60))
    time.sleep(0.5)
    return score(self, gathered)

  monkeypatch.setattr(Fewshot, "score", slow_score)
  few = {**EVALS["few"], "every_steps": 4, "baselines": False}
  config = _config(total_steps=12, evals={"few": few})
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      config, str(tmp_path), callbacks=[AtStep7(), StopAfter(9)]
    )
  rows = read_metrics(str(tmp_path))
  assert [r["step"] for r in rows if "few/5shot" in r] == [4]
  train.train_and_evaluate(config, str(tmp_path))
  rows = read_metrics(str(tmp_path))
  assert [r["step"] for r in rows if "few/5shot" in r] == [4, 8, 12]
  assert all("few/l2=64/1shot" in r for r in rows if "few/5shot" in r)
  assert all(was_in_time)


@pytest.mark.slow
def test_a_finished_run_is_left_alone(run, capfd):
  workdir, state = run
  before = read_metrics(workdir)
  again = train.train_and_evaluate(_config(log_steps=5), workdir)
  metadata = json.loads((pathlib.Path(workdir) / "metadata.json").read_text())
  assert metadata["step"] == 20
  assert metadata["accounting"]["images_seen"] == 320
  np.testing.assert_array_equal(
    again.params["head"]["kernel"], state.params["head"]["kernel"]
  )
  assert read_metrics(workdir) == before
  err = capfd.readouterr().err
  assert "resumes     step 20" in err
  assert "config.log_steps was 4, is now 5" in err
  assert "all 20 steps were done before" in err


@pytest.mark.slow
def test_evaluate_alone_gives_the_same(run, capsys):
  workdir, _ = run
  scores = evaluate_lib.evaluate(_config(), workdir)
  last = read_metrics(workdir)[-2:]
  for row in last:
    for key, value in row.items():
      if key not in ("step", "time"):
        assert scores[key] == value
  assert "step 20: test" in capsys.readouterr().out


@pytest.mark.nightly  # the demo, which CI runs, does so
def test_fine_tune_at_another_size(run, tmp_path, capfd):
  workdir, state = run
  ops = "decode|resize((24, 32))"
  evals = {"test": {**EVALS["test"], "ops": ops}}
  config = _config(
    init=workdir, data__ops=ops, total_steps=1, optim__lr=1e-9, evals=evals
  )
  tuned = train.train_and_evaluate(config, str(tmp_path))
  err = capfd.readouterr().err
  assert "2x2 -> 3x4" in err
  cost = checkpointer.load_metadata(str(tmp_path))["accounting"]
  assert cost["images_seen"] == 16
  assert cost["init"] == checkpointer.load_metadata(workdir)["accounting"]
  assert "cost        16 images seen" in err
  assert "; the run before: 320 images seen, " in err
  table = tuned.params["Transformer"]["posembed_input"]["pos_embedding"]
  assert table.shape == (1, 13, 32)
  # Corners stay where they are; one step of 1e-9 is far below float32's last
  # place of numbers of this size.
  old = np.asarray(
    state.params["Transformer"]["posembed_input"]["pos_embedding"]
  )
  np.testing.assert_allclose(table[0, [0, 1, 4, 9, 12]], old[0], atol=2e-7)


@pytest.mark.parametrize("every, steps", [(0, [8]), (3, [3, 6, 8]), (9, [8])])
def test_steps_with_a_checkpoint(every, steps, tmp_path):
  config = _config(checkpoint__every_steps=every).checkpoint
  checkpointer = Checkpointer(str(tmp_path), config, total_steps=8)
  assert [s for s in range(1, 9) if checkpointer.is_periodic(s)] == steps


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"total_steps": 10},
      "config.total_steps: got 10, expected at least the 20",
    ),
    ({"seed": 1}, "config.seed was 0, is now 1 (other batches"),
    ({"fake_data": True}, "config.fake_data was False, is now True"),
  ],
)
def test_a_run_goes_on_as_it_began(run, changes, message):
  workdir, _ = run
  with pytest.raises(ConfigError) as e:
    train.train_and_evaluate(_config(**changes), workdir)
  assert message in str(e.value)
  config = json.loads((pathlib.Path(workdir) / "config.json").read_text())
  assert config["total_steps"] == 20


def test_a_workdir_that_cannot_be(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="--workdir: got .* no files can be"):
    train.train_and_evaluate(_config(), str(tmp_path / "file"))


@pytest.mark.slow
def test_a_checkpoint_is_never_of_a_run_that_diverged(tmp_path):
  config = _config(
    optim__lr=1e38,
    optim__warmup_steps=1,
    optim__clip_norm=None,
    checkpoint__every_steps=1,
    log_steps=20,
    evals=None,
  )
  with pytest.raises(FloatingPointError, match="is (nan|inf) at step"):
    train.train_and_evaluate(config, str(tmp_path))
  params, _ = checkpointer.load_params(str(tmp_path))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
