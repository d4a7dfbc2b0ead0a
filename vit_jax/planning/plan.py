"""Compiles a run for a TPU slice that is not there, and estimates its cost.

vit-jax plan --config=configs/vit_l16.py:imagenet21k --topology=v5e:16x16

The step is the one that trains, and the compiler is the real one (`pip install
'jax[tpu]'`), which needs no TPU. Memory is what that compiler reports. Times
are estimates: no chip has confirmed them.
"""

import contextlib
import dataclasses
import json
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax import sharding
from vit_jax import step as step_lib
from vit_jax.config import Config, ConfigError, cli
from vit_jax.config.checks import faults as word_faults
from vit_jax.config.checks import warmup_faults
from vit_jax.data import facts, splits
from vit_jax.distributed import signals
from vit_jax.planning import host_requirements
from vit_jax.planning import programs as programs_lib
from vit_jax.planning.price import price
from vit_jax.planning.search import Search
from vit_jax.planning.table import table
from vit_jax.planning.topology import describe

OUT_OF_MEMORY = (
  r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm",
  r"\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)",
)

# The schedule's steps depend on the length; the cost of a step does not. It is
# longer than any warm-up.
UNKNOWN_LENGTH = 10**9


def lower(config: Config, mesh: Mesh) -> tuple[Any, tuple[Any, dict]]:
  """Returns the jitted train step and its abstract arguments.

  `step.lower(*arguments).compile()` compiles it for the devices of the mesh,
  which need not exist.

  Args:
    config: The run.
    mesh: A mesh with the axes of `sharding.AXES`.

  Returns:
    The step; and (state, batch), of `jax.ShapeDtypeStruct` with shardings.
  """
  found = with_length(facts_of(config))
  assembly = step_lib.assemble(config, found, mesh)
  batch = programs_lib.batch(
    config.data.batch_size, found.image_size, (), jnp.int32, mesh
  )
  return assembly.train_step, (assembly.state, batch)


def plan(
  config: Config,
  topology: str,
  input_rate: float | None = None,
  chip_hour: tuple[float, str] | None = None,
) -> dict[str, Any]:
  """Compiles the step for a slice, and estimates its time.

  There are two estimates, which differ, and no chip has confirmed either:
  `cycles_seconds` is the compiler's cycles of every instruction over the clock,
  plus the bytes of collectives over the links' rate, nothing overlapped;
  `optimal_seconds` is the compiler's coarser roofline, or the sum over all
  instructions of the longer of arithmetic and traffic at full rates, if that is
  more. Both count every trip of a loop. `price_seconds` is their geometric
  mean, from which all rates follow.

  Args:
    config: The run.
    topology: Name of the slice, such as "v5e:16x16".
    input_rate: Images per second of a core of a host; None: as measured.
    chip_hour: Price of a chip for an hour, and its unit; None: unknown.

  Returns:
    A dict for JSON. For each device (`devices.Chip`): fits, capacity_bytes,
    peak_bytes (XLA's own), argument_bytes, temporary_bytes, flops,
    bytes_accessed, cycles_seconds, link_seconds (the part of the collectives),
    between_slices_seconds (of these, the part between slices), optimal_seconds,
    price_seconds, collectives (kind -> [times, bytes]), mfu. For all: chips,
    split (in words), images_per_second, steps, hours, chip_hours (None where
    the length is unknown), what `hosts.needs` returns, price (of all
    chip-hours), price_per_chip_hour, price_unit. If the step does not fit, what
    compiling would tell is None.

  Raises:
    ConfigError: The config, or the slice, cannot work.
  """
  chip, devices = describe(topology)
  if found := faults(config, devices):
    raise ConfigError(found)
  mesh = sharding.make_mesh(config.mesh, devices)
  step, arguments = lower(config, mesh)
  known = facts_of(config)
  steps, num_chips = known.total_steps, int(len(devices) * chip.share)
  result: dict[str, Any] = {
    "topology": topology,
    "chips": num_chips,
    "mesh": dict(mesh.shape),
    "batch_size": config.data.batch_size,
    "microbatches": sharding.microbatches_of(config, mesh),
    "remat": config.model.remat,
    "scan": config.model.scan,
    "split": sharding.describe(config, arguments[0].params, mesh),
    "capacity_bytes": chip.capacity,
    "steps": steps,
    "price_per_chip_hour": chip_hour and chip_hour[0],
    "price_unit": chip_hour[1] if chip_hour else "",
  }
  try:
    compiled = step.lower(*arguments).compile()
  except jax.errors.JaxRuntimeError as e:
    peak, capacity = _needed_and_there(e)
    return {
      **result,
      **dict.fromkeys(PRICES),
      "fits": False,
      "peak_bytes": peak,
      "capacity_bytes": capacity,
    }
  memory = compiled.memory_analysis()
  result |= {
    "fits": memory.peak_memory_in_bytes <= chip.capacity,
    "peak_bytes": memory.peak_memory_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
  }
  result |= price(compiled, chip)
  seconds = result["price_seconds"]
  per_image = config.model.train_flops(known.image_size, known.num_classes)
  needed = per_image * config.data.batch_size / len(devices)
  images_per_second = config.data.batch_size / seconds
  hours = steps and steps * seconds / 3600
  num_hosts = len({device.process_index for device in devices})
  result |= host_requirements.needs(
    config,
    images_per_second,
    num_hosts,
    topology.split(":")[0],
    input_rate,
  )
  return result | {
    "images_per_second": images_per_second,
    "mfu": needed / (seconds * chip.peak_flops),
    "hours": hours,
    "chip_hours": hours and hours * num_chips,
    "price": hours and chip_hour and hours * num_chips * chip_hour[0],
  }


def _needed_and_there(error: Exception) -> tuple[int, int]:
  """Parses the bytes in the compiler's message; raises any other error."""
  found = next(
    (m for p in OUT_OF_MEMORY if (m := re.search(p, str(error)))), None
  )
  if found is None:
    raise error
  unit = {"K": 2**10, "M": 2**20, "G": 2**30}
  needed, there = (
    int(float(number) * unit[letter])
    for number, letter in (found.group(1, 2), found.group(3, 4))
  )
  return needed, there


PRICES = (
  "argument_bytes temporary_bytes flops bytes_accessed cycles_seconds"
  " link_seconds between_slices_seconds optimal_seconds price_seconds"
  " collectives images_per_second mfu hours"
  " chip_hours hosts input_per_host input_rate input_rate_of input_cores"
  " host_vcpus price"
).split()


def faults(config: Config, devices: list) -> list[str]:
  """Returns what is wrong with a run on these chips, one text a fault."""
  found = [*word_faults(config), *sharding.mesh_faults(config, devices)]
  if not found and is_of_hosts(devices):
    found = sharding.row_faults(sharding.make_mesh(config.mesh, devices))
  try:
    steps = facts_of(config).total_steps
  except (TypeError, ZeroDivisionError):
    return found  # which tells that there is no length, or no batch
  except ValueError as e:
    is_told = any(str(e) in fault for fault in found)
    return found if is_told else [*found, str(e)]
  if config.total_steps is None and steps:
    found += warmup_faults(config, steps)
  return found


def is_of_hosts(devices: list) -> bool:
  """Whether each slice surely has several hosts.

  libtpu describes hosts of four chips, but up to eight of v5e or v6e can be of
  one host.
  """
  return len(devices) // len(sharding.slices(devices)) > 8


def with_length(known: step_lib.Facts) -> step_lib.Facts:
  """Returns the facts with some length, which changes no cost of a step."""
  steps = known.total_steps or UNKNOWN_LENGTH
  return dataclasses.replace(known, total_steps=steps)


def facts_of(config: Config) -> step_lib.Facts:
  """Returns the facts of a run without looking at data.

  Its total_steps is None where only the data tell it.

  Raises:
    ValueError: Neither the config nor `FACTS` states the classes.
  """
  known = facts.known(config.data.dataset)
  num_classes = known.num_classes if known else 0
  if not config.num_classes and not num_classes:
    raise ValueError(
      f"config.num_classes: got None for {config.data.dataset!r}, whose classes"
      " only the data tell; set it."
    )
  num_examples = None
  if config.data.dataset in facts.FACTS:  # of others the numbers are no facts
    with contextlib.suppress(splits.SplitError):
      num_examples = splits.num_examples(config.data.split, known.splits)
  return step_lib.Facts.of(config, num_classes, num_examples)


def main(args: cli.Args) -> None:
  """Plans or searches, and prints the result."""
  wants_json = args.flags["json"] == "true"
  try:
    found = list(args.errors)
    if not args.flags["topology"]:
      found.append("--topology: got none, expected such as v5e:16x16.")
    options = _options(args.flags, found)
    if found:
      raise ConfigError(found)
    topology = args.flags["topology"]
    with signals.blocked():
      num_devices = len(describe(topology)[1])  # libtpu's handlers come with it
      signals.end_at_once(lambda: f"{topology} was not compiled to the end")
    if args.flags["search"] == "true":
      result, config = _search(
        args.config, topology, num_devices, wants_json, options
      )
    else:
      config = args.config
      text = f"compiling the train step for {topology}, which may take minutes"
      print(text, file=sys.stderr, flush=True)
      result = signals.in_thread(lambda: plan(config, topology, **options))
    if args.flags["all"] == "true" and result["price_seconds"]:
      result |= signals.in_thread(lambda: rehearsed(config, topology, result))
  except ConfigError as e:
    sys.exit(str(e))
  show(result, wants_json)


def rehearsed(
  config: Config, topology: str, found: dict[str, Any]
) -> dict[str, Any]:
  """Compiles what a run compiles beside its step, for a slice.

  Args:
    config: The run.
    topology: Name of the slice.
    found: What `plan` returned for it.

  Returns:
    `programs`: what `rehearsal.compiled` yields, the step first; `evaluation`:
    evaluators' shares of the steps' time, by estimate, {} where the length of
    the run is unknown; `not_rehearsed`: what is left out, in words; `fits`, of
    all.
  """
  chip, devices = describe(topology)
  mesh = sharding.make_mesh(config.mesh, devices)
  known = with_length(facts_of(config))
  programs, passes, notes = programs_lib.programs(config, known, mesh)
  evaluating = {p.program for p in passes}

  def seconds(name: str, program: Any) -> float | None:
    return price(program, chip)["price_seconds"] if name in evaluating else None

  (step,) = (p for p in programs if p.name == "train_step")
  peak = found["peak_bytes"] + step.beside
  programs.remove(step)
  time, steps = found["price_seconds"], found["steps"]
  first = {"peak_bytes": peak, "fits": peak <= chip.capacity, "seconds": time}
  rows = [
    {"name": step.name} | first,
    *programs_lib.compiled(programs, chip.capacity, seconds),
  ]
  return {
    "programs": rows,
    "evaluation": programs_lib.evaluation(passes, rows, steps * time)
    if steps
    else {},
    "not_rehearsed": notes,
    "fits": all(row["fits"] for row in rows),
  }


def _options(flags: dict[str, str | None], faults: list[str]) -> dict[str, Any]:
  """Returns the arguments of `plan` that flags give; faults are added."""
  found = {}
  for flag, name, read in (
    (
      "input_rate",
      "input_rate",
      partial(host_requirements.positive, "input_rate"),
    ),
    ("price_per_chip_hour", "chip_hour", host_requirements.price),
  ):
    try:
      found[name] = read(flags[flag]) if flags[flag] else None
    except ValueError as e:
      faults.append(str(e))
  return found


def _search(
  config: Config,
  topology: str,
  num_devices: int,
  wants_json: bool,
  options: dict[str, Any],
) -> tuple[dict[str, Any], Config]:
  """Returns the plan of the fastest choice, and its config."""
  stream = sys.stderr if wants_json else sys.stdout
  search = Search(
    config,
    num_devices,
    lambda choice: plan(choice, topology, **options),
    lambda text: print(text, file=stream, end="", flush=True),
  )

  def last_words() -> str:
    print(file=stream, flush=True)  # ends the line of the choice
    if search.fastest:
      show(search.fastest[0], wants_json)
    at = f"at choice {search.number} of {search.total}"
    return f"{at}; fastest so far: {search.best()}"

  signals.end_at_once(last_words)
  signals.in_thread(search.run)
  return search.fastest


def show(result: dict[str, Any], wants_json: bool) -> None:
  """Prints a plan."""
  print(json.dumps(result) if wants_json else table(result), flush=True)
