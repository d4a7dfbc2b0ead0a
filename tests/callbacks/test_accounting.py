"""Cost and time of a run: closed forms, and once over any number of resumes."""

import json
import time

import pytest

from vit_jax.batch import batches_seen
from vit_jax.callbacks import accounting, run_record
from vit_jax.callbacks.accounting import BUCKETS, KEY, Accounting


class Process:
  """A process of a run, on a clock that passes as the test sets it.

  Args:
    start: Step from which it trains.
    saved: Metadata of the checkpoint.
    earlier: Start and last sign of life of the processes before.
  """

  now, lives = 1e9, ()

  def __init__(self, start=0, saved=None, earlier=(), **options):
    options = {
      "batch_size": 10,
      "flops_per_image": 2 * 10**15,
      "num_devices": 8,
      "num_examples": 100,
    } | options
    self.notes, Process.lives = [], earlier
    note = self.notes.append
    self.accounting = Accounting(workdir="run", note=note, **options)
    self.accounting.on_start(start, None, saved or {})

  def spend(self, **seconds):
    for name, value in seconds.items():
      self.accounting.on_phase(name)
      Process.now += value
      self.accounting.on_phase("start")

  def saves(self, step=0):
    """Returns metadata through JSON, as a checkpoint has it."""
    state = self.accounting.state_dict(step)
    return json.loads(json.dumps({KEY: state}))

  def seconds(self):
    seconds = self.accounting.state_dict(0)["seconds"]
    return {k: v for k, v in seconds.items() if v}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
  monkeypatch.setattr(time, "time", lambda: Process.now)
  monkeypatch.setattr(Process, "now", 1e9)
  monkeypatch.setattr(run_record, "earlier", lambda _: [*Process.lives])


def test_closed_form():
  run = Process(batch_size=16, flops_per_image=6 * 10**9)
  values = run.accounting.on_log(1000, {"loss": 2.0})
  assert values["loss"] == 2.0
  assert values["images_seen"] == 16_000 and values["epoch"] == 160.0
  assert values["exaflops"] == 6e9 * 16_000 / 1e18


def _run(stops=(), total=100):
  """The account at the end of a run that stops at these steps, and resumes."""
  saved, start = {}, 0
  for stop in (*stops, total):
    run = Process(start, saved)
    run.spend(step=36.0 * (stop - start))
    saved, start = run.saves(stop), stop
    run.spend(step=999.0)  # lost: no checkpoint has it
  return saved[KEY]


@pytest.mark.parametrize("stops", [(), (10, 20, 90)])
def test_carried_over_resumes_once(stops):
  account = _run(stops)
  assert account["images_seen"] == 1000
  assert account["exaflops"] == 2.0
  # 100 steps of 36 seconds on 8 devices.
  assert account["device_hours"] == pytest.approx(8.0)
  assert account["init"] is None


def test_a_run_from_another_that_resumes_on_other_devices():
  """The run before is stated beside, not added."""
  before = _run()
  first = Process(init=before, flops_per_image=10**18, num_devices=2)
  first.spend(step=3600)
  options = dict(batch_size=5, flops_per_image=10**18, num_devices=4)
  then = Process(7, first.saves(7), **options)
  then.spend(step=3600)
  account = then.accounting.state_dict(9)
  assert account["images_seen"] == 7 * 10 + 2 * 5
  assert account["exaflops"] == 80 and account["device_hours"] == 2 + 4
  assert account["init"] == before
  text = accounting.cost_text(account)
  assert "6 device-hours; " in text and "8 device-hours" in text


def test_no_image_is_left_out_however_often_batches_change():
  metadata, step, seen = {}, 0, set()
  for size, steps in ((24, 5), (32, 2), (24, 3), (10, 4)):
    first = batches_seen(metadata, step, size) * size
    assert 0 <= len(seen) - first < size
    seen |= {*range(first, first + steps * size)}
    run = Process(step, metadata, batch_size=size)
    step += steps
    metadata = run.saves(step)
    assert seen == {*range(metadata[KEY]["position"])}
  assert metadata[KEY]["images_seen"] == 24 * 8 + 32 * 2 + 10 * 4


def test_the_time_of_one_process():
  run = Process()
  seconds = dict(start=3.0, compile=4.0, input=0.5, step=10.0, save=2.5)
  run.spend(**seconds)
  assert run.seconds() == seconds
  values = run.accounting.on_log(1, {})
  assert values.keys() >= {"goodput", *(f"seconds/{b}" for b in BUCKETS)}
  assert values["goodput"] == 0.5
  row = {f"train/{k}": v for k, v in values.items()}
  assert accounting.seconds_of_rows([{"step": 1, **row}, {"step": 1}]) == {
    **dict.fromkeys(BUCKETS, 0.0),
    **seconds,
  }
  run.accounting.on_step(1, {}, {})
  run.accounting.on_end(None)
  goodput, cost = run.notes
  assert "50 % of 20s" in goodput and "compile 4.0s" in goodput
  assert "10 images" in cost and "0.0444 device-hours" in cost


def test_killed_after_a_checkpoint():
  """All from the checkpoint to the last sign of life is done again."""
  first = Process()
  first.spend(start=3.0, step=10.0, save=1.0)
  saved = first.saves()
  first.spend(step=4.0, input=2.0, evaluation=5.0)
  earlier = [(1e9, Process.now)]
  Process.now += 60.0  # killed at some time in this minute
  second = Process(0, saved, earlier)
  second.spend(start=3.0, step=7.0)
  assert second.seconds() == {
    **{"start": 6.0, "step": 17.0, "save": 1.0},
    **{"repeated": 11.0, "restart": 60.0},
  }
  assert sum(second.seconds().values()) == Process.now - 1e9


def test_killed_before_its_first_checkpoint_and_again():
  earlier = []
  for _ in range(3):
    began = Process.now
    Process(earlier=earlier).spend(start=2.0, step=5.0)
    earlier.append((began, Process.now))
    Process.now += 1.0
  run = Process(earlier=earlier)
  assert run.seconds() == {"repeated": 21.0, "restart": 3.0}
  assert run.accounting.state_dict(0)["began"] == 1e9
