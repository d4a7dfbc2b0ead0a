"""Times the training step of a config: `vit-jax benchmark`.

vit-jax benchmark --config=configs/vit_b16.py \
  --config.data.batch_size=256

Step, state and loop are the same as in training. A synthetic batch stays on the
device; with `--input=real` the config's data are read and transferred as in
training. Nothing is written.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import malloc, microbatch, sharding
from vit_jax import step as step_lib
from vit_jax.batch import Batch
from vit_jax.callbacks import CallbackList
from vit_jax.callbacks.throughput import Throughput
from vit_jax.config import Config, ConfigError, cli
from vit_jax.devices import peak_flops, unknown_peak
from vit_jax.distributed import processes
from vit_jax.models import efficient_attention
from vit_jax.options import not_installed, unexpected
from vit_jax.tools.planning import planner
from vit_jax.tools.planning.learner import learner_of, trainer_of

if TYPE_CHECKING:
  import vit_jax.experiment

State = TypeVar("State")

BLOCKS = 10  # number of blocks of steps; medians are over blocks
# Least steps of a block. Other programs delay the clock by a step or two, which
# makes one block longer and the next shorter.
LEAST_BLOCK = 5
WARMUP = 3  # least number of steps before the timed ones
# Platform -> sides of the square matrices whose product is measured as the
# ceiling, and how many products a call computes.
MATMULS = {
  "cpu": ((512, 1024, 2048), 1),
  "gpu": ((4096, 8192, 16384), 16),
  "tpu": ((4096, 8192, 16384), 16),
}


def measure(
  config: Config, kind: str = "synthetic", steps: int = 50
) -> dict[str, Any]:
  """Compiles and times the training step of a config on this machine.

  Evaluators and config.init are ignored.

  Args:
    config: The run.
    kind: Input, a key of `INPUT_FNS`.
    steps: Number of timed steps, in equal blocks; see `blocks`.

  Returns:
    A dict for JSON.
    The run: device, devices, mesh, jax, xla_flags, model, params, image_size,
    dtype, batch_size, microbatches, remat, scan, input, attention (on a GPU;
    otherwise "").
    Times: compile_seconds (without a cache), steps, block_steps, step_seconds
    (median over blocks), step_seconds_least, step_seconds_most.
    Per device: images_per_second_per_device; flops_per_second (FLOPs of the
    model, without recomputation); ceiling_flops and ceiling_side (see
    `matmul_peak`); mfu (relative to that ceiling, 0 to 1); peak_flops (the
    maker's bfloat16 rate) and mfu_of_peak, None if unknown; peak_bytes and
    peak_bytes_by ("device", or "compiler" if the device does not count).
    All devices: images_per_second, flops_per_image, loss (of the last step),
    input_wait (share of the time, 0 to 1; None for synthetic input).

  Raises:
    ConfigError: The run cannot work, or does not fit the memory.
  """
  config = dataclasses.replace(config, evals=(), init=None)
  experiment = check(config, kind)
  try:
    return _measure(config, kind, steps, experiment)
  except jax.errors.JaxRuntimeError as e:
    if "RESOURCE_EXHAUSTED" not in str(e):
      raise
    key, why = "config.data.batch_size", str(e).splitlines()[0]
    expected = "one that fits, or config.optim.microbatch or model.remat=full"
    error = unexpected(key, config.data.batch_size, expected, why)
    raise ConfigError([error]) from None


def _measure(
  config: Config,
  kind: str,
  steps: int,
  experiment: "vit_jax.experiment.Experiment | None",
) -> dict[str, Any]:
  mesh = sharding.make_mesh(config.mesh)
  device = mesh.devices.flat[0]
  batches, run_shape = INPUT_FNS[kind](config, mesh, experiment)
  size = run_shape.image_size
  learner = learner_of(config, run_shape)
  trainer = trainer_of(config, run_shape, mesh, learner)
  state, batch = trainer.init_state(), next(batches)
  start = time.perf_counter()
  compiled = trainer.train_step.lower(state, batch).compile()
  compile_seconds = time.perf_counter() - start

  leaves = jax.tree.leaves(trainer.state.params)
  steps, block = blocks(steps)
  per_image = learner.flops(config.model, run_shape)
  seconds, wait, loss = run(
    compiled,
    state,
    itertools.chain([batch], batches),
    Throughput(config.data.batch_size, mesh.size, per_image, None),
    warmup=max(WARMUP, block),
    block=block,
    steps=steps,
  )
  peak_bytes, by = peak_memory(device, compiled)
  del state, batch  # frees memory for the matrices of the ceiling
  side, ceiling = matmul_peak(config.model.dtype, device)
  peak = peak_flops(device.device_kind)
  images = config.data.batch_size / statistics.median(seconds)
  rate = images / mesh.size * per_image
  return {
    "device": device.device_kind,
    "devices": mesh.size,
    "mesh": dict(mesh.shape),
    "jax": jax.__version__,
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
    "model": f"{config.model.name} {config.model.variant}",
    "params": sum(math.prod(x.shape) for x in leaves),
    "image_size": list(size),
    "dtype": config.model.dtype,
    "batch_size": config.data.batch_size,
    "microbatches": microbatch.microbatches_of(config, mesh),
    "remat": config.model.remat,
    "scan": config.model.scan,
    "attention": efficient_attention.describe_implementation(
      config.model, size, device.platform
    ),
    "input": kind,
    "compile_seconds": compile_seconds,
    "steps": steps,
    "block_steps": block,
    "step_seconds": statistics.median(seconds),
    "step_seconds_least": min(seconds),
    "step_seconds_most": max(seconds),
    "images_per_second": images,
    "images_per_second_per_device": images / mesh.size,
    "flops_per_image": per_image,
    "flops_per_second": rate,
    "ceiling_flops": ceiling,
    "ceiling_side": side,
    "mfu": rate / ceiling,
    "peak_flops": peak,
    "mfu_of_peak": peak and rate / peak,
    "peak_bytes": peak_bytes,
    "peak_bytes_by": by,
    "loss": loss,
    "input_wait": wait if kind == "real" else None,
  }


def blocks(steps: int) -> tuple[int, int]:
  """Returns the number of timed steps, and the steps of a block.

  >>> blocks(10), blocks(77)
  ((10, 5), (77, 7))
  """
  block = min(steps, max(LEAST_BLOCK, steps // BLOCKS))
  return steps - steps % block, block


def run(
  step: Callable[[State, dict], tuple[State, dict]],
  state: State,
  batches: Iterator[dict],
  throughput: Throughput,
  *,
  warmup: int,
  block: int,
  steps: int,
) -> tuple[list[float], float, float]:
  """Runs warm-up and timed steps, with the calls of the train loop.

  Args:
    step: The compiled step; it donates the state.
    state: State of the run; do not use it afterwards.
    batches: Batches on the device.
    throughput: A new `Throughput`, which this function closes.
    warmup: Steps before the first timed step.
    block: Steps of a block.
    steps: Timed steps; a multiple of `block`.

  Returns:
    Seconds per step of each block; the share of the time in which the device
    waited for input, 0 to 1; the last loss.
  """
  ends = []
  with CallbackList([throughput]) as hooks:
    for number in range(1, warmup + steps + 1):
      with hooks.phase("input"):
        batch = next(batches)
      with hooks.phase("step"):
        state, metrics = step(state, batch)
      hooks.on_step(number, batch, metrics)
      ends.append(throughput.step_end)
      if number == warmup:
        hooks.on_log(warmup, {})  # the timed steps begin here
    loss = float(metrics["loss"])
    wait = hooks.on_log(warmup + steps, {})["input_wait"]
    # A thread of `Throughput` notes when each step ends: on a CPU dispatching
    # a step waits for the previous one, so this thread would be late.
    at = [end.result() for end in ends[warmup - 1 :: block]]
  seconds = [(b - a) / block for a, b in itertools.pairwise(at)]
  return seconds, wait, loss


def matmul_peak(dtype: str, device: jax.Device) -> tuple[int, float]:
  """Measures the highest rate of square matrix products on one device.

  Sums are at least float32, as in the model. The matrices are random, because a
  GPU multiplies zeros faster.

  Args:
    dtype: Type of the matrices.
    device: A device of this process.

  Returns:
    The side of the fastest matrices; their rate in FLOP/s, 2 FLOPs per
    multiply-add.
  """
  sides, times = MATMULS.get(device.platform, MATMULS["gpu"])

  @jax.jit
  def chain(x, w):
    return jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)

  def rate(side: int) -> float:
    keys = jax.random.split(jax.device_put(jax.random.key(0), device))
    x, w = (jax.random.normal(k, (side, side)) for k in keys)
    # Scaled so that the products have the size of x.
    x, w = x.astype(dtype), (w / side**0.5).astype(dtype)
    jax.block_until_ready(chain(x, w))
    seconds = []
    for _ in range(5):
      start = time.perf_counter()
      jax.block_until_ready(chain(x, w))
      seconds.append(time.perf_counter() - start)
    return times * 2 * side**3 / statistics.median(seconds)

  rates = {side: rate(side) for side in sides}
  return max(rates.items(), key=lambda item: item[1])


def peak_memory(device: jax.Device, compiled) -> tuple[int, str]:
  """Returns the peak of bytes in use, and who counted: "device" or "compiler".

  A CPU does not count, so its number is the compiler's for the step alone.
  """
  counted = device.memory_stats() or {}
  if "peak_bytes_in_use" in counted:
    return counted["peak_bytes_in_use"], "device"
  memory = compiled.memory_analysis()
  total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  total += memory.output_size_in_bytes - memory.alias_size_in_bytes
  return total, "compiler"


def synthetic(
  config: Config, mesh: Mesh, experiment: None = None
) -> tuple[Iterator[dict], step_lib.RunShape]:
  """Returns one batch of noise, repeated without end, and the run's shape."""
  del experiment
  run_shape = planner.with_length(planner.run_shape_of(config))
  rows, rng = config.data.batch_size, np.random.default_rng(config.seed % 2**32)
  batch = Batch(
    **{
      name: rng.integers(0, 256, (rows, *shape), np.uint8)
      for name, shape in config.view_shapes.items()
    },
    label=rng.integers(0, run_shape.num_classes, rows, np.int32),
    mask=np.ones(rows, bool),
    index=np.arange(rows),
  )
  on_device = jax.block_until_ready(sharding.to_global(batch, mesh))
  return itertools.repeat(on_device), run_shape


def real(
  config: Config, mesh: Mesh, experiment: "vit_jax.experiment.Experiment"
) -> tuple[Iterator[dict], step_lib.RunShape]:
  """Returns batches of the config's data, and the run's shape.

  Each `next` reads and transfers a batch.
  """
  data = experiment.data
  batches = data.batches(0, jax.process_index(), jax.process_count())
  to_global = functools.partial(sharding.to_global, mesh=mesh)
  return map(to_global, batches), experiment.run_shape


INPUT_FNS = {"synthetic": synthetic, "real": real}


def check(
  config: Config, kind: str, errors: Sequence[str] = ()
) -> "vit_jax.experiment.Experiment | None":
  """Raises if the run cannot be timed.

  Args:
    config: The run.
    kind: Kind of input, a key of `INPUT_FNS`.
    errors: Earlier errors, which are raised together with others.

  Returns:
    The run with open data for real input; None for synthetic input.

  Raises:
    ConfigError: All errors.
  """
  errors = list(errors)
  if kind not in INPUT_FNS:
    errors.append(unexpected("--input", repr(kind), " or ".join(INPUT_FNS)))
  if kind == "real":
    if error := not_installed(["tensorflow"], "train"):
      errors.append(f"--input=real: {error}")
    else:
      from vit_jax import run_checks

      return run_checks.setup(config, errors=errors)
  if errors := errors + planner.errors(config, jax.devices()):
    raise ConfigError(dict.fromkeys(errors))
  return None


def table(result: dict[str, Any]) -> str:
  """Returns a measurement as a table of text."""
  height, width = result["image_size"]
  milli = {
    k: f"{1e3 * result[k]:,.1f}" for k in result if k.startswith("step_")
  }
  num_blocks = result["steps"] // result["block_steps"]
  mfu = f"{100 * result['mfu']:.1f} % of the ceiling"
  if result["peak_flops"]:
    mfu += (
      f", {100 * result['mfu_of_peak']:.1f} % of the maker's"
      f" {result['peak_flops'] / 1e12:,.1f} TFLOP/s"
    )
  elif error := unknown_peak(result["device"]):
    mfu += f"; {error}"
  counted = {
    "device": "as the device counts",
    "compiler": "of the step, as the compiler counts",
  }
  flags = f"; XLA_FLAGS={result['xla_flags']}" if result["xla_flags"] else ""
  rows = {
    "device": f"{result['devices']} x {result['device']}, jax"
    f" {result['jax']}{flags}",
    "model": f"{result['model']}, {result['params'] / 1e6:,.1f} M parameters,"
    f" {height} x {width} pixels, {result['dtype']}",
    "batch": f"{result['batch_size']:,} images,"
    f" microbatches={result['microbatches']}, remat={result['remat']},"
    f" scan={result['scan']}, {result['input']} input",
    **({"attention": result["attention"]} if result["attention"] else {}),
    "compile": f"{result['compile_seconds']:.1f} s",
    "step": f"{milli['step_seconds']} ms, the median of {num_blocks} blocks of"
    f" {result['block_steps']} ({milli['step_seconds_least']} to"
    f" {milli['step_seconds_most']})",
    "speed": f"{result['images_per_second']:,.1f} images/s,"
    f" {result['images_per_second_per_device']:,.1f} a device",
    "work": f"{result['flops_per_image'] / 1e9:,.2f} GFLOP an image,"
    f" {result['flops_per_second'] / 1e12:,.3f} TFLOP/s a device",
    "ceiling": f"{result['ceiling_flops'] / 1e12:,.3f} TFLOP/s, products of"
    f" {result['ceiling_side']:,} x {result['ceiling_side']:,}"
    f" {result['dtype']}",
    "MFU": mfu,
    "memory": f"{result['peak_bytes'] / 2**30:.2f} GiB at most,"
    f" {counted[result['peak_bytes_by']]}",
  }
  if result["input_wait"] is not None:
    rows["waiting"] = (
      f"{100 * result['input_wait']:.0f} % of the time for input"
    )
  return "\n".join(f"{key:<12}{value}" for key, value in rows.items())


def main(args: cli.Args) -> None:
  """Measures and prints."""
  processes.refuse_several_hosts()
  kind, steps = args.flags["input"] or "synthetic", args.flags["steps"] or "50"
  try:
    errors = list(args.errors)
    if not steps.isdecimal() or int(steps) < 1:
      errors.append(unexpected("--steps", repr(steps), "a number from 1"))
    if processes.is_slurm_step():
      why = "Each would time its own devices alone."
      errors.append(unexpected("srun", "several tasks", "--ntasks=1", why))
    if errors:
      check(args.config, kind, errors)
    malloc.reuse_freed_memory()
    result = measure(args.config, kind, int(steps))
  except ConfigError as e:
    sys.exit(str(e))
  wants_json = args.flags["json"] == "true"
  print(json.dumps(result) if wants_json else table(result))
