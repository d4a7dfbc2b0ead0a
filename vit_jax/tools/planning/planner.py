"""The memory, time, host cores and cost of a run on a slice of TPUs.

The step is the train step. It is compiled by the compiler of the TPU,
which reports the memory. Times are estimates: no chip has confirmed them.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax import microbatch, optim_checks, sharding
from vit_jax import step as step_lib
from vit_jax.config import Config, ConfigError, checks
from vit_jax.data import dataset_info, records, splits
from vit_jax.objectives.objective import Learner
from vit_jax.options import unexpected
from vit_jax.tools.planning import hlo, host_requirements
from vit_jax.tools.planning import programs as programs_lib
from vit_jax.tools.planning.learner import learner_of, trainer_of
from vit_jax.tools.planning.topology import canonical, describe
from vit_jax.trainable import saved_params

OUT_OF_MEMORY = (
  r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm",
  r"\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)",
)

# Steps of a run of unknown length, more than any warm-up. The cost of a step
# does not depend on them.
UNKNOWN_LENGTH = 10**9


def lower(
  config: Config, mesh: Mesh, learner: Learner | None = None
) -> tuple[Callable, tuple[step_lib.TrainState, dict]]:
  """Returns the jitted train step and its abstract arguments.

  `step.lower(*arguments).compile()` compiles the step for the devices of the
  mesh, which need not exist.

  Args:
    config: The run.
    mesh: A mesh with the axes of `sharding.AXES`.
    learner: What the objective has made; None to make it now.

  Returns:
    The step; and (state, batch), trees of `jax.ShapeDtypeStruct` with
    shardings.
  """
  run_shape = with_length(run_shape_of(config))
  learner = learner or learner_of(config, run_shape)
  trainer = trainer_of(config, run_shape, mesh, learner)
  batch = sharding.abstract_batch(
    config.data.batch_size,
    config.view_shapes,
    (),
    mesh,
  )
  return trainer.train_step, (trainer.state, batch)


def checked(
  config: Config, mesh: Mesh, learner: Learner | None = None
) -> tuple[Callable, tuple[step_lib.TrainState, dict]]:
  """Returns the result of `lower`.

  Raises:
    ConfigError: Options name parameters that the model does not have.
  """
  try:
    step, arguments = lower(config, mesh, learner)
  except ValueError as e:  # config.lora.targets
    raise ConfigError([str(e)]) from None
  if texts := optim_checks.errors(
    config.optim,
    saved_params(arguments[0].params, arguments[0].fixed),
    config.model,
    config.objective.own,
  ):
    raise ConfigError(texts)
  return step, arguments


def plan(
  config: Config,
  topology: str,
  input_rate: float | None = None,
  chip_hour: tuple[float, str] | None = None,
) -> dict[str, Any]:
  """Compiles the step for a slice, and estimates its time.

  No chip has confirmed the estimates. `cycles_seconds` is the compiler's cycles
  divided by the clock, plus the bytes of the collectives divided by the rate of
  the links, without overlap. `optimal_seconds` is the larger of two numbers:
  the compiler's roofline; and the sum over the instructions of the time of
  arithmetic or of traffic at full rate, whichever is longer. Both count every
  trip of a loop. `price_seconds` is their geometric mean, from which all rates
  are computed.

  Args:
    config: The run.
    topology: Name of the slice, see `topology.canonical`.
    input_rate: Images per second that a core of a host decodes; None: the
      measured rate.
    chip_hour: Price of a chip for an hour, and its unit; None: unknown.

  Returns:
    A dict for JSON.

    Per device (see `devices.Chip`): fits; capacity_bytes; peak_bytes (XLA's);
    argument_bytes; temporary_bytes; flops; bytes_accessed; cycles_seconds;
    link_seconds, the part of the collectives; between_slices_seconds, their
    part between slices; optimal_seconds; price_seconds; collectives (kind ->
    [times, bytes]); mfu (None if some parameters are frozen).

    For the run: chips; split (text); images_per_second; steps, hours and
    chip_hours (None if the length is unknown); the values of
    `host_requirements.needs`; price of all chip-hours; price_per_chip_hour;
    price_unit.

    The `ESTIMATES` are None if the step does not fit.

  Raises:
    ConfigError: The config or the slice cannot work.
  """
  topology = canonical(topology)
  chip, devices = describe(topology)
  if texts := errors(config, devices):
    raise ConfigError(texts)
  mesh = sharding.make_mesh(config.mesh, devices)
  run_shape = run_shape_of(config)
  learner = learner_of(config, with_length(run_shape))
  step, arguments = checked(config, mesh, learner)
  steps, num_chips = run_shape.total_steps, int(len(devices) * chip.share)
  result: dict[str, Any] = {
    "topology": topology,
    "chips": num_chips,
    "mesh": dict(mesh.shape),
    "batch_size": config.data.batch_size,
    "microbatches": microbatch.microbatches_of(config, mesh),
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
    peak, capacity = parse_out_of_memory(e)
    return {
      **result,
      **dict.fromkeys(ESTIMATES),
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
  result |= hlo.estimate(compiled.as_text(), compiled.cost_analysis(), chip)
  seconds = result["price_seconds"]
  per_image = learner.flops(config.model, run_shape)
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
    "mfu": None if config.is_partial else needed / (seconds * chip.peak_flops),
    "hours": hours,
    "chip_hours": hours and hours * num_chips,
    "price": hours and chip_hour and hours * num_chips * chip_hour[0],
  }


def parse_out_of_memory(error: Exception) -> tuple[int, int]:
  """Returns the bytes that a program needs, and the bytes of the memory.

  Args:
    error: The compiler's error; any other error is raised again.
  """
  match = next(
    (m for p in OUT_OF_MEMORY if (m := re.search(p, str(error)))), None
  )
  if match is None:
    raise error
  unit = {"K": 2**10, "M": 2**20, "G": 2**30}
  needed, capacity = (
    int(float(number) * unit[letter])
    for number, letter in (match.group(1, 2), match.group(3, 4))
  )
  return needed, capacity


# Keys that `plan` sets to None if the step does not fit.
ESTIMATES = (
  "argument_bytes temporary_bytes flops bytes_accessed cycles_seconds"
  " link_seconds between_slices_seconds optimal_seconds price_seconds"
  " collectives images_per_second mfu hours"
  " chip_hours hosts input_per_host input_rate input_rate_of input_cores"
  " host_vcpus price"
).split()


def errors(config: Config, devices: list) -> list[str]:
  """Returns the errors of a run on these chips, one text for each."""
  texts = [*checks.errors(config), *sharding.mesh_errors(config, devices)]
  if not texts and has_several_hosts(devices):
    texts = sharding.row_errors(sharding.make_mesh(config.mesh, devices))
  try:
    steps = run_shape_of(config).total_steps
  except (TypeError, ZeroDivisionError):
    return texts  # without these sizes further checks are impossible
  except ValueError as e:
    is_known = any(str(e) in text for text in texts)
    return texts if is_known else [*texts, str(e)]
  if config.total_steps is None and steps:
    texts += checks.warmup_errors(config, steps)
  return texts


def has_several_hosts(devices: list) -> bool:
  """Whether each slice certainly has several hosts.

  libtpu describes hosts of four chips, but a host of v5e or v6e can have eight.
  """
  return len(devices) // len(sharding.slices(devices)) > 8


def with_length(run_shape: step_lib.RunShape) -> step_lib.RunShape:
  """Fills in a length if it is unknown; a step's cost does not depend on it."""
  steps = run_shape.total_steps or UNKNOWN_LENGTH
  return dataclasses.replace(run_shape, total_steps=steps)


def run_shape_of(config: Config) -> step_lib.RunShape:
  """Returns the sizes of a run without opening its data.

  total_steps is None if it depends on a data set that is not in `DATASETS`.

  Raises:
    ValueError: Neither the config nor `DATASETS` states the classes.
  """
  data = config.data
  own = records.info(data.dataset, data.split)
  known = own or dataset_info.lookup(data.dataset)
  if not config.num_classes and not (known and known.splits):
    expected = f"a number, as that of {config.data.dataset!r} is not known"
    raise ValueError(unexpected("config.num_classes", None, expected))
  num_examples = None
  if own or data.dataset in dataset_info.DATASETS:  # other data sets may change
    with contextlib.suppress(splits.SplitError):
      num_examples = splits.num_examples(data.split, known.splits)
  num_classes = known.num_classes if known else 0  # of images alone: 0
  return step_lib.run_shape_of(config, num_classes, num_examples)


def plan_programs(
  config: Config, topology: str, step_plan: dict[str, Any]
) -> dict[str, Any]:
  """Compiles the other programs of a run for a slice.

  Args:
    config: The run.
    topology: Name of the slice.
    step_plan: The result of `plan`.

  Returns:
    `programs`, the results of `programs.compiled`, the step first;
    `evaluation`, the result of `programs.evaluation`, {} if the length of the
    run is unknown; `left_out`, notes about programs that are left out;
    `fits`, whether all programs fit.
  """
  chip, devices = describe(topology)
  mesh = sharding.make_mesh(config.mesh, devices)
  run_shape = with_length(run_shape_of(config))
  programs, passes, notes = programs_lib.programs(config, run_shape, mesh)
  evaluating = {p.program for p in passes}

  def seconds(name: str, program: jax.stages.Compiled) -> float | None:
    if name not in evaluating:
      return None
    text, costs = program.as_text(), program.cost_analysis()
    return hlo.estimate(text, costs, chip)["price_seconds"]

  (step,) = (p for p in programs if p.name == "train_step")
  peak = step_plan["peak_bytes"] + step.beside
  programs.remove(step)
  time, steps = step_plan["price_seconds"], step_plan["steps"]
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
    "left_out": notes,
    "fits": all(row["fits"] for row in rows),
  }
