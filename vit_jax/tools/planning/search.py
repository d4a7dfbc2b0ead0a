"""The planner's search for the fastest mesh, microbatch, remat and scan."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from vit_jax.config import Config, ConfigError
from vit_jax.options import unexpected

Plan = dict[str, Any]  # see `vit_jax.tools.planning.planner.plan`


class Search:
  """Plans one choice after the other, reports each, and keeps the fastest.

  First it varies mesh, microbatch and remat at the batch of the config, with
  scanned blocks, which compile in a minute. Then it compiles the best choices
  with a loop over the blocks. The ranking may change, because a scan with fsdp
  gathers and reduces in every microbatch. Last it tries half and twice the
  batch, which would need another learning rate. The fastest choice has the most
  images per second by the planner's estimate.

  Args:
    config: The run; it is the first choice.
    num_devices: Number of devices of the slice.
    plan: Compiles one choice; see `vit_jax.tools.planning.planner.plan`.
    report: Prints a text: a line with its newline, or the start of a line.

  Attributes:
    fastest: Plan and config of the fastest choice that fits; None if none has
      been found.
    number: Number of the choice that is compiled now, from 1; 0 before that.
    total: Number of choices.
  """

  def __init__(
    self,
    config: Config,
    num_devices: int,
    plan: Callable[[Config], Plan],
    report: Callable[[str], None],
  ):
    self.fastest: tuple[Plan, Config] | None = None
    self.number = 0
    self._config, self._num_devices = config, num_devices
    self._plan, self._report = plan, report
    self._choices = list(choices(config, num_devices))
    self._batches = batches(config, num_devices)
    self.total = len(self._choices) + 1 + len(self._batches)

  def run(self) -> Plan:
    """Returns the plan of the fastest choice.

    Raises:
      ConfigError: Nothing fits.
    """
    self._report(
      f"{self.total} choices: {len(self._choices)} of mesh, microbatch and"
      " remat, the fastest of them without scan, and it with a batch of"
      f" {' and '.join(map(str, self._batches)) or 'no other size'};"
      " times are estimates\n"
    )
    for choice in self._choices:
      self._attempt(choice)
    if self.fastest and self.fastest[1].model.scan:
      self._attempt(in_a_loop(self.fastest[1]))
    else:
      self.total -= 1
    base = self.fastest[1] if self.fastest else self._config
    for batch_size in self._batches:
      data = dataclasses.replace(base.data, batch_size=batch_size)
      self._attempt(dataclasses.replace(base, data=data))
    if not self.fastest:
      size = self._config.data.batch_size
      expected = "one that fits with some mesh, microbatch and remat"
      raise ConfigError([unexpected("config.data.batch_size", size, expected)])
    self._report(f"fastest by estimate: {self.best()}\n")
    return self.fastest[0]

  def _attempt(self, choice: Config) -> None:
    self.number += 1
    count = f"{self.number:>{len(str(self.total))}}/{self.total}"
    self._report(f"[{count}] {options(choice):<70} ")
    try:
      result = self._plan(choice)
    except ConfigError as e:
      if self.number == 1:
        raise  # the config itself cannot work
      # With twice the batch a run may end before its warm-up.
      self._report(f"cannot work: {'; '.join(e.errors)}\n")
      return
    is_faster = result["fits"] and (
      self.fastest is None
      or result["images_per_second"] > self.fastest[0]["images_per_second"]
    )
    if is_faster:
      self.fastest = (result, choice)
      best = "this"
    else:
      best = speed(self.fastest[0]) if self.fastest else "none"
    self._report(f"{describe(result)}; fastest so far: {best}\n")

  def best(self) -> str:
    """Returns a text with estimate and options of the fastest choice so far."""
    if self.fastest is None:
      return "none"
    result, choice = self.fastest
    flags = options(choice).replace(" ", " --config.")
    return f"{describe(result)}, with --config.{flags}"


def choices(config: Config, num_devices: int) -> Iterator[Config]:
  """Yields the config, then other meshes, microbatches and remat.

  All of them split the batch over all devices. If the batch cannot be split
  so, only the config is yielded.
  """
  yield config
  sizes = [config.data.batch_size, *(e.batch_size for e in config.evals)]
  if any(n % num_devices for n in sizes if n is not None):
    return
  rows = config.data.batch_size // num_devices
  microbatches = [None, *(n for n in (64, 32, 16, 8) if n < rows)]
  models = (config.model.stacked() or config.model).recomputed()
  for fsdp, microbatch, model in itertools.product(
    (1, -1), microbatches, models
  ):
    choice = dataclasses.replace(
      config,
      mesh=dataclasses.replace(config.mesh, data=-1, fsdp=fsdp, tensor=1),
      optim=dataclasses.replace(config.optim, microbatch=microbatch),
      model=model,
    )
    if choice != config:
      yield choice


def in_a_loop(config: Config) -> Config:
  """Returns the config with a loop over its blocks instead of a scan."""
  return dataclasses.replace(config, model=config.model.unstacked())


def batches(config: Config, num_devices: int) -> list[int]:
  """Returns half and twice the batch, if the devices divide them."""
  sizes = (config.data.batch_size // 2, config.data.batch_size * 2)
  return [n for n in sizes if n and n % num_devices == 0]


def options(choice: Config) -> str:
  """Returns the options of a choice, as KEY=VALUE without "config."."""
  mesh, model = choice.mesh, choice.model
  text = (
    f"mesh.data={mesh.data} mesh.fsdp={mesh.fsdp} mesh.tensor={mesh.tensor}"
    f" data.batch_size={choice.data.batch_size}"
    f" optim.microbatch={choice.optim.microbatch}"
  )
  if "remat" in model.__dataclass_fields__:
    text += f" model.remat={model.remat}"
  if "scan" in model.__dataclass_fields__:
    text += f" model.scan={str(model.scan).lower()}"
  return text


def describe(result: Plan) -> str:
  """Returns the estimate of a choice as a short text."""
  if not result["fits"]:
    return f"does not fit: {gib(result['peak_bytes'])}"
  milli = 1e3 * result["price_seconds"]
  return f"{milli:.1f} ms, {speed(result)}, {gib(result['peak_bytes'])}"


def speed(result: Plan) -> str:
  """Returns the estimated rate of a choice."""
  return f"{result['images_per_second']:,.0f} images/s"


def gib(size: int) -> str:
  """Returns bytes as text, in GiB."""
  return f"{size / 2**30:.2f} GiB"
