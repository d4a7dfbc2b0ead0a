"""The planner's search: other ways to do the same work, and the fastest."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from vit_jax.config import Config, ConfigError

Found = dict[str, Any]


def search(
  config: Config,
  num_devices: int,
  plan: Callable[[Config], Found],
  report: Callable[[str], None],
) -> Found:
  """Plans every choice, tells each, and returns the fastest that fits.

  First mesh, microbatch and remat at the batch of the config, with blocks in a
  scan, which compiles in a minute; then the best of these in a loop; then half
  and twice its batch. The fastest has the most images a second; mind that
  another batch wants another learning rate.

  Args:
    config: The run; itself the first choice.
    num_devices: Of the slice.
    plan: Compiles one choice; see `vit_jax.plan.plan`.
    report: Takes a line of text.

  Raises:
    ConfigError: Nothing fits.
  """
  fitting: list[tuple[Found, Config]] = []

  def attempt(choice: Config) -> None:
    found = plan(choice)
    report(line(found))
    if found["fits"]:
      fitting.append((found, choice))

  def best() -> tuple[Found, Config]:
    return max(fitting, key=lambda pair: pair[0]["images_per_second"])

  for choice in choices(config, num_devices):
    attempt(choice)
  if fitting and best()[1].model.scan:
    attempt(in_a_loop(best()[1]))
  if fitting:
    report(f"fastest at this batch: {line(best()[0])}")
  for choice in other_batches(best()[1] if fitting else config, num_devices):
    attempt(choice)
  if not fitting:
    raise ConfigError(
      [
        f"config.data.batch_size: got {config.data.batch_size}, which fits in"
        " none of the ways tried; use a smaller batch, or a larger slice."
      ]
    )
  report(f"fastest: {line(best()[0])}")
  return best()[0]


def choices(config: Config, num_devices: int) -> Iterator[Config]:
  """Yields the config, then its batch on other meshes and in other pieces."""
  yield config
  rows = config.data.batch_size // num_devices
  microbatches = [None, *(n for n in (64, 32, 16, 8) if n < rows)]
  for fsdp, microbatch, remat in itertools.product(
    (1, -1), microbatches, ("none", "dots", "full")
  ):
    yield dataclasses.replace(
      config,
      mesh=dataclasses.replace(config.mesh, data=-1, fsdp=fsdp, tensor=1),
      optim=dataclasses.replace(config.optim, microbatch=microbatch),
      model=dataclasses.replace(config.model, scan=True, remat=remat),
    )


def in_a_loop(config: Config) -> Config:
  """Returns the config with its blocks one by one."""
  model = dataclasses.replace(config.model, scan=False)
  return dataclasses.replace(config, model=model)


def other_batches(config: Config, num_devices: int) -> Iterator[Config]:
  """Yields half and twice the batch, where the devices divide them."""
  for batch_size in (config.data.batch_size // 2, config.data.batch_size * 2):
    if batch_size and batch_size % num_devices == 0:
      data = dataclasses.replace(config.data, batch_size=batch_size)
      yield dataclasses.replace(config, data=data)


def line(found: Found) -> str:
  """Returns one choice and its price in a line."""
  mesh = " ".join(f"{k}={v}" for k, v in found["mesh"].items())
  what = (
    f"{mesh} batch={found['batch_size']} accum={found['accum_steps']}"
    f" remat={found['remat']} scan={found['scan']}"
  )
  if not found["fits"]:
    return f"{what:<70} does not fit: {gib(found['peak_bytes'])}"
  return (
    f"{what:<70} {1e3 * found['price_seconds']:8.1f} ms"
    f" {found['images_per_second']:9,.0f} images/s  {gib(found['peak_bytes'])}"
  )


def gib(size: int) -> str:
  """Returns bytes in words."""
  return f"{size / 2**30:.2f} GiB"
