"""What a run cost: images seen, exaFLOPs, device-hours.

The exaFLOPs are those of Table 6 of arXiv:2010.11929, as its numbers imply: 2
FLOPs per multiply-add, three passes a training step (forward, and backward as
two), times the images seen; docs/compute.md sets ours beside the paper's. They
are of the model, whatever is computed again or in addition. Device-hours are
the devices of the run times the hours on the clock from the compilation of the
first step on, with evaluations and checkpoints. What an interruption lost is
not in them: only steps that a checkpoint kept count, once.
"""

import time
from collections.abc import Callable
from typing import Any

from vit_jax.callbacks import goodput as goodput_lib

KEY = "accounting"  # in the metadata of a checkpoint
POSITION = "position"  # there: of the next image in the order of the run
# What `Account.at` returns; see `vit_jax.config.json_file.faults`.
SHAPE: dict[str, Any] = {
  "images_seen": float,
  "flops": float,
  "exaflops": float,
  "device_hours": float,
}
SHAPE["init"] = SHAPE  # the run before, and those before that


class Account:
  """Counts from the step on at which a process starts or resumes.

  Args:
    batch_size: Images per step, over all devices.
    flops_per_image: FLOPs of a training step per image.
    num_devices: Number of devices of all processes.
    start: Step from which this process trains.
    before: What the checkpoint of that step states, as `at` returned it; None:
      it states nothing. The hours are then unknown, unless `start` is 0.
    init: What the checkpoint that a new run starts from states; a resumed run
      has it in `before`. None: nothing, or no such checkpoint.
    goodput: Where the time of the run goes; None: not told.
    clock: Seconds, for tests.
    position: Of the first image from `start` on; None: that of batches which
      always had this size.
  """

  def __init__(
    self,
    batch_size: int,
    flops_per_image: int,
    num_devices: int,
    start: int = 0,
    before: dict[str, Any] | None = None,
    init: dict[str, Any] | None = None,
    goodput: goodput_lib.Goodput | None = None,
    clock: Callable[[], float] = time.monotonic,
    position: int | None = None,
  ):
    self._batch_size = batch_size
    self._flops_per_image = flops_per_image
    self._num_devices = num_devices
    self._start = start
    num_images = start * batch_size
    self._position = num_images if position is None else position
    self._before = before or {
      "images_seen": num_images,
      "flops": flops_per_image * num_images,
      "device_hours": None if start else 0.0,
      "init": init,
    }
    self._goodput = goodput
    self._clock = clock
    self._began = clock()

  def at(self, step: int) -> dict[str, Any]:
    """Returns the account after so many updates, for a checkpoint's JSON.

    Returns:
      images_seen, flops (exact), exaflops and device_hours (None: unknown) of
      this run; and `init`, the same of the run that it started from, or None.
    """
    before = self._before
    images = (step - self._start) * self._batch_size
    hours = (self._clock() - self._began) / 3600 * self._num_devices
    flops = before["flops"] + images * self._flops_per_image
    known = before["device_hours"]
    return {
      "images_seen": before["images_seen"] + images,
      "flops": flops,
      "exaflops": flops / 1e18,
      "device_hours": None if known is None else known + hours,
      "init": before["init"],
    }

  def metadata(self, step: int) -> dict[str, Any]:
    """Returns what a checkpoint of this step states of its cost."""
    position = self._position + (step - self._start) * self._batch_size
    found = {"step": step, KEY: self.at(step), POSITION: position}
    if self._goodput is not None:
      found[goodput_lib.KEY] = self._goodput.at()
    return found

  def metrics(self, step: int) -> dict[str, float]:
    """Returns the numbers of `at`, and of the goodput, by their names in
    metrics.jsonl."""
    found = {
      f"train/{k}": float(v)
      for k, v in self.at(step).items()
      if k in ("images_seen", "exaflops", "device_hours") and v is not None
    }
    return found | (self._goodput.metrics() if self._goodput else {})

  def text(self, step: int) -> str:
    """Returns the lines that end a run."""
    cost = f"cost        {text(self.at(step))}"
    if self._goodput is None or step == self._start:
      return cost
    return f"{self._goodput.text()}\n{cost}"


def batches_seen(metadata: dict[str, Any], step: int, batch_size: int) -> int:
  """Returns how many batches of this size come before the next image.

  `step`, unless the run had batches of another size before; rounded down, so
  that less than a batch is seen twice, and none left out.

  Args:
    metadata: Of the checkpoint of the step; {}: unknown.
    step: Batches of any size that were taken.
    batch_size: Images of a batch from here on.
  """
  images = metadata.get(KEY, {}).get("images_seen", step * batch_size)
  return int(metadata.get(POSITION, images)) // batch_size


def account_of(run: Any, num_devices: int, phases: Any, held: Any) -> Account:
  """Returns the account of a run, carried over from where it resumes.

  From now on each beat of the run tells its goodput.

  Args:
    run: A `prepare.Run` that was checked.
    num_devices: Number of devices of all processes.
    phases: `phases.Phases` of this process.
    held: The run's `lock.Lock`.
  """
  key = goodput_lib.KEY
  goodput = goodput_lib.Goodput(
    phases, run.resumed_metadata.get(key), held.last_words.get(key)
  )
  held.tells = lambda: {key: goodput.at()}
  size, num_classes = run.facts.image_size, run.facts.num_classes
  batch_size, metadata = run.config.data.batch_size, run.resumed_metadata
  batches = batches_seen(metadata, run.start, batch_size)
  return Account(
    batch_size,
    run.config.model.train_flops(size, num_classes),
    num_devices,
    run.start,
    metadata.get(KEY),
    run.init_metadata.get(KEY),
    goodput,
    position=batches * batch_size,
  )


def text(account: dict[str, Any] | None) -> str:
  """Returns an account in words, and those of the runs before it.

  Example:
    >>> text({"images_seen": 1200, "exaflops": 2.5, "device_hours": 0.25})
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
  init = account.get("init")
  return ", ".join(parts) + (f"; the run before: {text(init)}" if init else "")


def number(value: float) -> str:
  """Returns three digits, or all those before the point.

  Example:
    >>> number(0.0012345), number(0.25), number(12345.6)
    ('0.00123', '0.25', '12,346')
  """
  return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
