"""Cost of a run, and the use of its time, over all of its processes.

ExaFLOPs are counted as in Table 6 of arXiv:2010.11929: 2 FLOPs per
multiply-add, three passes per training step (the backward pass counts as two),
times the images seen; docs/paper.md compares them with the paper's.
Recomputation does not count. Device-hours are the number of devices times the
hours on the clock since the compilation of the first step, with evaluations and
checkpoints. Steps that an interruption lost do not count.

Every second since the first start of the run is in one bucket, so the buckets
add up to the time on the clock. The buckets are `PHASES`; "repeated", the time
of a process after its last checkpoint before it died; and "restart", from the
last sign of life of a process to the start of the next.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.batch import batches_seen
from vit_jax.callbacks import run_record
from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import format_seconds
from vit_jax.config import json_file

if TYPE_CHECKING:
  from vit_jax.step import TrainState

KEY = "accounting"  # key in the metadata of a checkpoint
# Phases of the loop, see `Callback.on_phase`. start: imports, checks, restore.
# compile: the first step. input: waiting for a batch.
PHASES = ("start", "compile", "input", "step", "evaluation", "save")
BUCKETS = (*PHASES, "repeated", "restart")
GOODPUT = "goodput"  # share of the seconds that are in "step"
SECONDS = "seconds/"  # before the name of a bucket


class Accounting(Callback):
  """Adds cost and time to the account in the checkpoint's metadata.

  Args:
    batch_size: Images per step, over all devices.
    flops_per_image: FLOPs of a training step per image.
    num_devices: Number of devices of all processes.
    num_examples: Records of the training data.
    workdir: Folder of the run, whose record has the lifetimes of earlier
      processes; None if there were none.
    init: Account of the checkpoint from which a new run takes its weights, or
      None. A resumed run has it in its own account.
    began: Start of this process, seconds since the epoch; None for now.
    note: Prints lines, at the end of the run.
  """

  name = KEY

  def __init__(
    self,
    batch_size: int,
    flops_per_image: int | float,
    num_devices: int,
    num_examples: int,
    workdir: str | None = None,
    init: Mapping[str, Any] | None = None,
    began: float | None = None,
    note: Callable[[str], None] = print,
  ):
    self._batch_size = batch_size
    self._flops_per_image = flops_per_image
    self._num_devices = num_devices
    self._process_began = time.time() if began is None else began
    self._phase, self._phase_began = PHASES[0], self._process_began
    self._phase_seconds = dict.fromkeys(PHASES, 0.0)  # before this phase
    self._num_examples = num_examples
    self._workdir = workdir
    self._init = init
    self._note = note

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    del state
    self._start = self._step = start
    account = saved.get(KEY) or {}
    images = start * self._batch_size
    self._images = account.get("images_seen", images)
    self._flops = account.get("flops", self._flops_per_image * images)
    # Unknown if the checkpoint does not have them.
    self._device_hours = account.get("device_hours", None if start else 0.0)
    self._init = account.get("init", self._init)
    self._position = (
      batches_seen(saved, start, self._batch_size) * self._batch_size
    )
    self._setup_seconds = sum(self._process_seconds().values())
    earlier = run_record.earlier(self._workdir) if self._workdir else []
    self._began, self._seconds = _until(self._process_began, account, earlier)

  def on_phase(self, name: str) -> None:
    self._phase_seconds = self._process_seconds()
    self._phase, self._phase_began = name, time.time()

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self._step = step

  def _process_seconds(self) -> dict[str, float]:
    """Returns the seconds of this process in each of `PHASES` so far."""
    now = time.time() - self._phase_began
    before = self._phase_seconds
    return before | {self._phase: before[self._phase] + now}

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    account = self.state_dict(step)
    costs = {k: account[k] for k in ("images_seen", "exaflops", "device_hours")}
    seconds = account["seconds"]
    return {
      **values,
      "epoch": account["images_seen"] / self._num_examples,
      **{k: float(v) for k, v in costs.items() if v is not None},
      GOODPUT: round(_share(seconds), 4),
      **{f"{SECONDS}{k}": round(v, 3) for k, v in seconds.items()},
    }

  def state_dict(self, step: int) -> dict[str, Any]:
    """Returns the account after a number of updates.

    Returns:
      images_seen, flops (exact), exaflops and device_hours (None if unknown) of
      this run; `init`, the account of the run that its weights come from, or
      None; `position`, the index of the next image in the order of the run;
      `began`, the first start of the run, seconds since the epoch; `seconds` in
      each of `BUCKETS`, whose sum is the time since then.
    """
    images = (step - self._start) * self._batch_size
    flops = self._flops + images * self._flops_per_image
    seconds = self._process_seconds()
    hours = self._device_hours
    if hours is not None:
      since_setup = sum(seconds.values()) - self._setup_seconds
      hours += since_setup / 3600 * self._num_devices
    return {
      "images_seen": self._images + images,
      "flops": flops,
      "exaflops": flops / 1e18,
      "device_hours": hours,
      "init": self._init,
      "position": self._position + images,
      "began": self._began,
      "seconds": {k: v + seconds.get(k, 0.0) for k, v in self._seconds.items()},
    }

  def on_end(self, state: "TrainState") -> None:
    account = self.state_dict(self._step)
    if self._step > self._start:
      self._note(f"goodput     {time_text(account['seconds'])}")
    self._note(f"cost        {cost_text(account)}")


def _until(
  process_began: float,
  account: Mapping[str, Any],
  earlier: Sequence[tuple[float, float]],
) -> tuple[float, dict[str, float]]:
  """Returns the first start of a run and its seconds until this process.

  Args:
    process_began: Start of this process, seconds since the epoch.
    account: Account of the checkpoint; {} for none.
    earlier: Start and last sign of life of each earlier process.
  """
  seconds = seconds_of_metadata({KEY: account})
  began = account["began"] if seconds else process_began
  if not seconds:
    began = min([process_began, *(first for first, _ in earlier)])
    seconds = dict.fromkeys(BUCKETS, 0.0)
  saved_at = began + sum(seconds.values())
  # Two machines' clocks may differ by more than the restart took.
  gap = max(0.0, process_began - saved_at)
  lived = sum(max(0.0, last - max(first, saved_at)) for first, last in earlier)
  seconds["repeated"] += min(lived, gap)
  seconds["restart"] += max(0.0, gap - lived)
  return began, seconds


def seconds_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Returns the seconds of each bucket in the last row that has them, or {}."""
  for row in reversed(rows):
    if seconds := _valid({b: row.get(f"train/{SECONDS}{b}") for b in BUCKETS}):
      return seconds
  return {}


def seconds_of_metadata(metadata: Mapping[str, Any]) -> dict[str, float]:
  """Returns the seconds of each bucket in a run's or checkpoint's metadata.

  {} if there are none, or if the account is damaged.
  """
  account = metadata.get(KEY)
  if not isinstance(account, dict) or not _is_seconds(account.get("began")):
    return {}
  seconds = account.get("seconds")
  return _valid(seconds) if isinstance(seconds, dict) else {}


def _valid(seconds: Mapping[str, Any]) -> dict[str, float]:
  buckets = {b: seconds.get(b) for b in BUCKETS}
  return buckets if all(map(_is_seconds, buckets.values())) else {}


def _is_seconds(value: Any) -> bool:
  return json_file.is_number(value) and value >= 0


def _share(seconds: Mapping[str, float]) -> float:
  total = sum(seconds.values())
  return seconds["step"] / total if total else 0.0


def time_text(seconds: Mapping[str, float]) -> str:
  """Returns buckets as text, the longest first.

  Example:
    >>> time_text({"start": 30.0, "step": 90.0, "save": 0.0})
    '75 % of 2m00s in steps: step 1m30s, start 30s'
  """
  parts = sorted(seconds.items(), key=lambda item: -item[1])
  listed = ", ".join(f"{k} {duration(v)}" for k, v in parts if v >= 0.05)
  total = duration(sum(seconds.values()))
  return f"{100 * _share(seconds):.0f} % of {total} in steps: {listed}"


def duration(seconds: float) -> str:
  """Returns seconds as text, with a decimal below 10.

  Example:
    >>> duration(3.14), duration(61.0)
    ('3.1s', '1m01s')
  """
  return f"{seconds:.1f}s" if seconds < 10 else format_seconds(seconds)


def cost_text(account: Mapping[str, Any] | None) -> str:
  """Returns an account as text, with the accounts of the runs before it.

  Example:
    >>> cost_text({"images_seen": 1200, "exaflops": 2.5, "device_hours": 0.25})
    '1,200 images seen, 2.5 exaFLOPs, 0.25 device-hours'
  """
  if not account:
    return "unknown"
  parts = [
    f"{account.get('images_seen') or 0:,.0f} images seen",
    f"{number(account.get('exaflops') or 0)} exaFLOPs",
  ]
  hours = account.get("device_hours")
  parts.append(
    "device-hours unknown" if hours is None else f"{number(hours)} device-hours"
  )
  if init := account.get("init"):
    return f"{', '.join(parts)}; the run before: {cost_text(init)}"
  return ", ".join(parts)


def number(value: float) -> str:
  """Returns a number with three digits, or with all digits before the point.

  Example:
    >>> number(0.0012345), number(0.25), number(12345.6)
    ('0.00123', '0.25', '12,346')
  """
  return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
