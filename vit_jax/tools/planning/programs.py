"""Every program that a run compiles, and the memory that it needs.

A pod compiles an evaluation hours after its start. The planner finds out
beforehand whether it fits into the memory beside the optimizer's state.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import digests, sharding
from vit_jax import step as step_lib
from vit_jax.class_names import Head
from vit_jax.config import Config
from vit_jax.data import dataset_info, records, splits
from vit_jax.data.preprocessing import image_size
from vit_jax.eval_context import RunContext
from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig
from vit_jax.tools.planning.learner import learner_of, trainer_of

# Extra batches in device memory while a program runs: in training the next one,
# in an evaluation the previous one.
WAITING = 1


class Program(NamedTuple):
  """A program that is not compiled yet.

  name: Name of the program, such as "train_step" or "<evaluator>/features".
  fn: The function, a result of `jax.jit`.
  arguments: Abstract arguments with shardings.
  beside: Bytes on each device that are not arguments of the program.
  """

  name: str
  fn: Callable
  arguments: tuple
  beside: int


class Passes(NamedTuple):
  """The images that pass through the model for an evaluator in a run.

  name: Name of the evaluator.
  program: Name of the `Program` that computes a batch.
  images: Largest number of images in one evaluation, over all devices.
  batches: Number of batches of these images.
  times: Number of evaluations in the run.
  """

  name: str
  program: str
  images: int
  batches: int
  times: int


@dataclasses.dataclass(frozen=True)
class Split:
  """A split, described without its data; see `evaluator.Split`."""

  name: str
  split: str
  num_examples: int
  num_classes: int
  is_multilabel: bool
  class_names: None = None
  knows_labels: bool = False
  is_regression: bool = False

  def labels(self) -> np.ndarray:
    raise NotImplementedError("the planner reads no data")


def programs(
  config: Config, run_shape: step_lib.RunShape, mesh: Mesh
) -> tuple[list[Program], list[Passes], list[str]]:
  """Returns the programs of a run in order, and how evaluators use them.

  Collectives of a few numbers between processes are left out.

  Args:
    config: The run.
    run_shape: Sizes of the run, with a length.
    mesh: Mesh of the run; its devices need not exist.

  Returns:
    The programs; the `Passes` of each evaluator; notes about omitted programs.
  """
  learner = learner_of(config, run_shape)
  trainer = trainer_of(config, run_shape, mesh, learner)
  state = trainer.state
  rows = sharding.abstract_batch(
    config.data.batch_size,
    config.view_shapes,
    (),
    mesh,
  )
  state_bytes, batch_bytes = per_device(state), WAITING * per_device(rows)
  result = [
    Program("init", trainer.maker(lambda s: s), (), 0),
    Program("train_step", trainer.train_step, (state, rows), batch_bytes),
    Program("schedule", trainer.schedule, (0,), state_bytes + batch_bytes),
  ]
  if mesh.devices.flat[0].platform != "cpu":
    result += [
      Program(
        f"digest {name}",
        digests.program_of(x),
        (x,),
        state_bytes + batch_bytes - per_device(x),
      )
      for name, x in distinct_arrays(state).items()
    ]
  shared: dict[Any, Any] = {}
  notes, passes, seen = [], [], {}
  params = state.eval_params
  for written in config.evals:
    options = written.resolved(config.data.dataset, config.data.batch_size)
    sources = {
      of: split(options.dataset, getattr(options, of)) for of in options.SPLITS
    }
    if None in sources.values():
      notes.append(
        f"{options.name}: the number of classes of {options.dataset!r} is not"
        " known without its data"
      )
      continue
    evaluator = options.make(
      RunContext(
        options=options,
        config=config,
        sources=sources,
        predict=trainer.predict,
        mesh=mesh,
        random_params=trainer.init_params,
        head=Head(run_shape.num_classes * config.objective.trains_head, None),
        shared=shared,
      )
    )
    channels = config.model.channels
    images = eval_batch(options, sources["split"], mesh, channels)
    beside = state_bytes - per_device(params) + batch_bytes
    beside += WAITING * per_device(images)
    for name, fn in evaluator.programs().items():
      key = fn, options.batch_size, images["image"].shape, images["label"].shape
      if key not in seen:
        seen[key] = f"{options.name}/{name}"
        result.append(Program(seen[key], fn, (params, images), beside))
      if name == next(iter(evaluator.programs())):
        numbers = options.num_images(sources)
        if unknown := [x.split for x in sources.values() if not x.num_examples]:
          single_device = type(evaluator).single_device_programs
          has_others = single_device is not Evaluator.single_device_programs
          others = " and its programs of one device" * has_others
          notes.append(
            f"{options.name}: its share of the time{others}, because the number"
            f" of images of {options.dataset!r} {unknown} is not known"
          )
        num_batches = sum(-(-n // options.batch_size) for n in numbers)
        times = num_times(options.every_steps, run_shape.total_steps)
        passes.append(
          Passes(options.name, seen[key], sum(numbers), num_batches, times)
        )
    if all(x.num_examples for x in sources.values()):
      result += _single_device_programs(
        evaluator, (params, images), state_bytes + batch_bytes
      )
    if getattr(options, "baselines", False):
      result.append(
        Program(
          f"{options.name}/random_init",
          trainer.maker(lambda s: s.params),
          (),
          state_bytes + batch_bytes,
        )
      )
  return result, passes, notes


def _single_device_programs(
  evaluator: Evaluator, arguments: tuple, beside: int
) -> Iterator[Program]:
  """Yields the programs that one device runs on gathered features."""
  features = evaluator.programs().get("features")
  if features is None:
    return
  width = jax.eval_shape(features, *arguments)["x"].shape[-1]
  device = evaluator.context.mesh.devices.flat[0]
  one = jax.sharding.SingleDeviceSharding(device)
  on_one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
  for name, (fn, shapes) in evaluator.single_device_programs(width).items():
    arguments = jax.tree.map(on_one, shapes)
    yield Program(f"{evaluator.config.name}/{name}", fn, arguments, beside)


def num_times(every_steps: int, total_steps: int) -> int:
  """Returns the number of evaluations of a run: at multiples, and at the end.

  Example:
    >>> [num_times(n, 100) for n in (0, 30, 50)]
    [1, 4, 2]
  """
  return -(-total_steps // every_steps) if every_steps else 1


def split(dataset: str, name: str) -> Split | None:
  """Returns a split, described without its data; None if it is not known."""
  own = records.info(dataset, name)
  known = own or dataset_info.lookup(dataset)
  # The table describes fake data for a prefix.
  is_fake = (
    not own
    and dataset_info.prefix_of(dataset)
    and dataset not in dataset_info.DATASETS
  )
  if known is None or is_fake or not known.num_classes:
    return None
  number = 0
  with contextlib.suppress(splits.SplitError):
    number = splits.num_examples(name, known.splits)
  return Split(dataset, name, number, known.num_classes, known.is_multilabel)


def eval_batch(
  options: EvaluatorConfig, source: Split, mesh: Mesh, channels: int = 3
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns an abstract batch of an evaluator."""
  label = (source.num_classes,) if source.is_multilabel else ()
  images = {"image": (*image_size(options.ops), channels)}
  return sharding.abstract_batch(options.batch_size, images, label, mesh)


def per_device(tree: Any) -> int:
  """Returns the bytes of abstract arrays on each device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
  )


def distinct_arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns text of type, shape and sharding -> one array with these."""
  return {
    f"{x.dtype.name}{list(x.shape)} {x.sharding.spec}": x
    for x in jax.tree.leaves(tree)
  }


def compiled(
  programs: list[Program],
  capacity: int,
  seconds: Callable[
    [str, jax.stages.Compiled], float | None
  ] = lambda name, program: None,
) -> Iterator[dict[str, Any]]:
  """Compiles programs; yields the memory and time of each.

  Args:
    programs: The programs.
    capacity: Bytes of a device's memory.
    seconds: (name of a program, compiled program) -> estimated time.

  Yields:
    A dict per program: name; peak_bytes, with the bytes `beside` (None if the
    program alone does not fit); fits; seconds.
  """
  for program in programs:
    peak = time = None
    try:
      module = program.fn.lower(*program.arguments).compile()
      peak = module.memory_analysis().peak_memory_in_bytes + program.beside
      time = seconds(program.name, module)
    except jax.errors.JaxRuntimeError as e:
      if "RESOURCE_EXHAUSTED" not in str(e):
        raise
    yield {
      "name": program.name,
      "peak_bytes": peak,
      "fits": peak is not None and peak <= capacity,
      "seconds": time,
    }


def evaluation(
  passes: list[Passes], rows: list[dict[str, Any]], run_seconds: float
) -> dict[str, float]:
  """Returns, for each evaluator, its time / the time of all steps of a run.

  Args:
    passes: The images of the evaluators.
    rows: Results of `compiled`.
    run_seconds: Estimated time of all steps.
  """
  seconds = {row["name"]: row["seconds"] for row in rows}
  return {
    p.name: p.times * p.batches * (seconds[p.program] or 0.0) / run_seconds
    for p in passes
  }
