"""A step that is not finite: never applied, never saved, and reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import train
from vit_jax.batch import DataError
from vit_jax.callbacks import nonfinite
from vit_jax.checkpointing import checkpointer
from vit_jax.config import Config
from vit_jax.step import TrainState
from vit_jax.writers.metric_writer import is_measured, read_metrics


class Hot:
  """Random batches, of which some break the loss.

  Labels are numbers; those of the bad steps have one that is none.
  """

  num_examples, num_classes, class_names = 160, tiny.NUM_CLASSES, None
  is_multilabel = True

  def __init__(self, cfg: Config, *bad: int, ends: int | None = None):
    self._config, self._bad, self._ends = cfg, bad, ends

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      batch = tiny.batch(step, self._config)
      label = np.eye(tiny.NUM_CLASSES, dtype=np.float32)[batch["label"]]
      step += 1
      if step == self._ends:
        raise DataError("no more")
      if step in self._bad:
        label[3] = np.nan
      index = batch["index"] + 100 * step
      yield {**batch, "label": label, "index": index}


def config(**changes) -> Config:
  options = dict(total_steps=12, log_steps=5, objective__loss="sigmoid")
  options |= dict(data__dataset="digits", fake_data=True, optim__ema_decay=0.9)
  options |= dict(checkpoint__every_steps=4, **changes)
  return tiny.config(**options)


@pytest.mark.slow
def test_stops_before_it_is_saved(tmp_path):
  """Step 7 of a run with a checkpoint at 4, 8 and rows at 1, 4, 5, 8."""
  cfg = config(optim__microbatch=4)  # two on each device
  data = Hot(cfg, 7)
  with tiny.devices(2), pytest.raises(FloatingPointError) as e:
    train.train_and_evaluate(cfg, str(tmp_path), data)
  for words in ("grad_norm is nan at step 7", "step 4", "on_nonfinite=skip"):
    assert words in str(e.value)
  assert checkpointer.find(str(tmp_path)).name == "4"
  steps = [r["step"] for r in read_metrics(str(tmp_path))]
  assert steps == [1, 4, 5]
  (entry,) = nonfinite.read(str(tmp_path))
  assert entry["values"] == {"loss": "nan", "grad_norm": "nan"}
  assert entry["records"] == [list(range(700, 716))]
  assert entry["checkpoint"] == 4
  assert [line.split(":")[0] for line in entry["before"]] == [
    f"step {n}" for n in range(2, 7)
  ]


@pytest.mark.nightly
@tiny.devices(2)
def test_skips_and_counts_also_after_a_stop(tmp_path, capfd):
  """Steps 2, 6 and 10 are skipped, also by a run that ends at 11 once."""
  # The step of the test above, which is compiled already.
  cfg = config(on_nonfinite="skip", log_steps=2, optim__microbatch=4)
  one, two = (str(tmp_path / name) for name in ("one", "two"))
  data = Hot(cfg, 2, 6, 10)
  state = train.train_and_evaluate(cfg, one, data)
  rows = read_metrics(one)
  assert [(r["step"], r["train/skipped"]) for r in rows] == [
    (1, 0), (2, 1), (4, 1), (6, 2), (8, 2), (10, 3), (12, 3)
  ]  # fmt: skip
  assert [r["step"] for r in rows if "train/loss" not in r] == [2, 6, 10]
  # 12 batches, 9 updates: the last was the ninth of the schedule.
  schedule = tiny.Parts(cfg).trainer.schedule
  assert rows[-1]["train/lr"] == pytest.approx(schedule(8))
  assert capfd.readouterr().err.count("skipped     loss is nan") == 3

  # It ends after step 10, and begins again at the checkpoint of step 8.
  with pytest.raises(DataError):
    train.train_and_evaluate(cfg, two, Hot(cfg, 2, 6, 10, ends=11))
  again = train.train_and_evaluate(cfg, two, data)
  jax.tree.map(np.testing.assert_array_equal, state, again)
  drop = lambda r: {k: v for k, v in r.items() if not is_measured(k)}
  assert [drop(r) for r in read_metrics(two)] == [drop(r) for r in rows]
  for workdir in (one, two):
    assert [e["step"] for e in nonfinite.read(workdir)] == [2, 6, 10]


STATE = TrainState(0, {}, ())
# The last record is a copy of the first.
BATCH = {"index": jnp.array([0, 1, 2, Hot.num_examples])}


def _callback(folder, data=None, **changes):
  """Returns the callback of a new run, and the lines that it prints."""
  lines = []
  data = data or Hot(config())
  callback = nonfinite.NonFinite(
    config(**changes), str(folder), data, lambda: 4, lines.append
  )
  callback.on_start(0, STATE, {})
  return callback, lines


def _metrics(**changes):
  values = dict.fromkeys(nonfinite.METRICS, 1.0) | {"skipped": 0.0}
  return {k: jnp.float32(v) for k, v in (values | changes).items()}


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
  """Gradients are finite, and the update overflows."""
  callback, _ = _callback(tmp_path)
  with pytest.raises(FloatingPointError, match="param_norm is inf") as e:
    callback.on_log(5, {"loss": 1.0, "param_norm": np.inf})
  assert "on_nonfinite" not in str(e.value)  # the step was applied
  callback.on_step(5, BATCH, _metrics(param_norm=np.inf))
  callback.on_step(6, BATCH, _metrics())
  with pytest.raises(FloatingPointError, match="param_norm is inf at step 5"):
    callback.on_log(6, {})


def test_what_waits_on_the_devices_is_bounded(tmp_path):
  """A run that logs rarely learns of a bad step nevertheless."""
  callback, lines = _callback(tmp_path, on_nonfinite="skip", data__repeats=2)
  most, newest = nonfinite.MAX_PENDING, nonfinite.NUM_NEWEST
  for step in range(1, most):
    callback.on_step(step, BATCH, _metrics(skipped=step in (3, most - 1)))
  assert callback.skipped == 0 and not lines
  callback.on_step(most, BATCH, _metrics())
  assert callback.skipped == 1 and len(lines) == 1
  assert callback.undecodable == most - newest
  values = callback.on_log(most, {"loss": 1.0})
  assert values == {"loss": 1.0, "skipped": 2.0, "undecodable": most}
  assert callback.on_log(most, {})["skipped"] == 2.0
  entries = nonfinite.read(str(tmp_path))
  assert [e["step"] for e in entries] == [3, most - 1]
  assert entries[0]["records"] == [[0, 1, 2, 0]]


def test_a_damaged_file_of_its_own_is_begun_anew(tmp_path):
  for text in (b"{", b"[]", b'{"steps": [{"step": "x"}]}'):
    (tmp_path / nonfinite.FILE).write_bytes(text)
    assert nonfinite.read(str(tmp_path)) == []


def test_too_many_broken_records_over_all_processes(tmp_path):
  data = Hot(config())
  data.most_unusable = lambda step: 10 * step
  counts = {"counts": {"undecodable": 20, "skipped": 0}}
  callback, _ = _callback(tmp_path, data)
  callback.on_start(2, STATE, counts)
  assert callback.on_log(2, {})["undecodable"] == 20
  with pytest.raises(DataError, match="got 20 rows"):
    callback.on_log(1, {})
  # One step of 32 images is two of 16.
  callback.on_start(1, STATE, counts | {"accounting": {"images_seen": 32}})
  assert callback.on_log(1, {})["undecodable"] == 20
