"""Benchmarks on one GPU, in less than 8 minutes: `bash benchmarks/gpu.sh`.

It measures training steps as `vit-jax benchmark`, and timm's compiled steps in
the same minutes; attention by cuDNN and by XLA, with their
errors compared to float32; and XLA's options for GPUs, one at a time. It
downloads nothing; docs/performance.md lists what must be installed. The most
important measurements come first. Each runs in its own process, and writes a
line with its receipt, or with its error, to docs/gpu.jsonl. A measurement with
a line of the same code and machine is not repeated, so a second call continues
the first one.

bash benchmarks/gpu.sh
bash benchmarks/gpu.sh --tiny --out=/tmp/gpu.jsonl   # a try, also on a CPU
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from machine import machine

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Variant, pixels of a side, images a step: what fits 80 GB with timm's step.
MODELS = (
  ("B/16", 224, 512),
  ("L/16", 224, 256),
  ("L/16", 384, 64),
  ("H/14", 224, 128),
)
TINY = (("Ti/16", 32, 4), ("Ti/16", 48, 2))
TIMM_NAMES = {
  "Ti/16": "tiny_patch16",
  "B/16": "base_patch16",
  "L/16": "large_patch16",
  "H/14": "huge_patch14",
}
NUM_CLASSES = 1000
LR, DECAY, CLIP = 1e-3, 0.1, 1.0
# Off or on, against XLA's default.
FLAGS = (
  "--xla_gpu_enable_triton_gemm=false",
  "--xla_gpu_enable_latency_hiding_scheduler=true",
  "--xla_gpu_enable_command_buffer=",
  "--xla_gpu_exhaustive_tiling_search=true",
  "--xla_gpu_triton_gemm_any=false",
)
# The line of a traceback that names the error.
RAISED = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b", re.MULTILINE)
LEAST = 15  # seconds: with less left, nothing is begun


class Job(NamedTuple):
  """A measurement.

  group: Which table it is a row of.
  name: Its row.
  side: Function of this module that measures.
  what: Its arguments.
  flags: XLA's, beside those of the environment.
  """

  group: str
  name: str
  side: str
  what: dict[str, Any]
  flags: str = ""


def jobs(models: tuple, steps: int) -> Iterator[Job]:
  """Yields all measurements, the most wanted first."""

  def of(model: tuple, **more: Any) -> dict[str, Any]:
    variant, size, batch = model
    return dict(model=variant, size=size, batch=batch, steps=steps, **more)

  yield Job("parity", "attention", "parity", {"models": list(models)})
  for model in models:
    name = f"{model[0]}, {model[1]} px, batch {model[2]}"
    yield Job("step", f"{name}: ours", "ours", of(model))
    yield Job("step", f"{name}: timm", "timm", of(model))
  for model in models:
    if model[0] == models[-2][0]:  # at both sizes: by the number of tokens
      name = f"{model[0]}, {model[1]} px: XLA's attention"
      yield Job("attention", name, "ours", of(model, cudnn=False))
  for flag in FLAGS:
    yield Job("flags", f"{models[0][0]}: {flag}", "ours", of(models[0]), flag)


def our_config(model: str, size: int, batch: int, dtype: str):
  """Returns the run of this comparison."""
  from vit_jax import config

  return config.freeze(
    {
      "total_steps": 10_000,
      "num_classes": NUM_CLASSES,
      "model": {"variant": model, "dtype": dtype},
      "data": {"batch_size": batch, "ops": f"decode|resize({size})"},
      "optim": {"lr": LR, "weight_decay": DECAY, "clip_norm": CLIP},
    }
  )


def ours(
  model: str,
  size: int,
  batch: int,
  steps: int,
  cudnn: bool = True,
) -> dict[str, Any]:
  """Times our step; see `vit_jax.tools.benchmark.measure`."""
  from vit_jax.models import cudnn as by_cudnn
  from vit_jax.tools import benchmark

  if not cudnn:
    by_cudnn.PLATFORMS = ()
  config = our_config(model, size, batch, dtype())
  return benchmark.measure(config, steps=steps)


def timm_step(model: str, size: int, batch: int, device: str) -> Callable:
  """Returns a function that trains timm's model by one step, not waiting."""
  import torch
  import torch_libraries

  torch.manual_seed(0)
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  is_gpu = device == "cuda"
  network = torch_libraries.load("timm").create_model(
    f"vit_{TIMM_NAMES[model]}_224", img_size=size, num_classes=NUM_CLASSES
  )
  network = network.to(device).train()
  parameters = list(network.parameters())
  optimizer = torch.optim.AdamW(
    parameters, lr=LR, weight_decay=DECAY, fused=is_gpu
  )
  shape = (batch, 3, size, size)
  images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
  labels = torch.randint(0, NUM_CLASSES, (batch,), device=device)

  def loss_fn():
    with torch.autocast(device, torch.bfloat16, enabled=is_gpu):
      logits = network(images.float() / 127.5 - 1.0)
    return torch.nn.functional.cross_entropy(logits.float(), labels)

  if is_gpu:
    loss_fn = torch.compile(loss_fn)

  def step():
    loss = loss_fn()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss

  return step


def timm(model: str, size: int, batch: int, steps: int) -> dict[str, Any]:
  """Times timm's step as `vit_jax.tools.benchmark` times ours.

  Both do the same work on the same device: random uint8 images on the device,
  normalised in the step; softmax loss over 1000 classes; gradients clipped to
  a norm of 1; AdamW. timm's step uses torch.compile and bfloat16 autocast on a
  GPU, and is eager in float32 on a CPU. The models differ in the GELU, tanh
  here and erf in timm.
  """
  import torch
  from torch.utils.benchmark import Timer

  device = "cuda" if torch.cuda.is_available() else "cpu"
  step = timm_step(model, size, batch, device)
  start = time.perf_counter()
  step().item()
  first_seconds = time.perf_counter() - start
  timer = Timer(
    "step()", globals={"step": step}, num_threads=torch.get_num_threads()
  )
  block = min(steps, max(5, steps // 10))  # each waits for the GPU once
  timer.timeit(block)
  seconds = [timer.timeit(block).mean for _ in range(steps // block)]
  result = {"step_seconds": statistics.median(seconds)}
  result |= {"compile_seconds": first_seconds, "torch": torch.__version__}
  result["images_per_second"] = batch / result["step_seconds"]
  if device == "cuda":
    result["device"] = torch.cuda.get_device_name()
    result["peak_bytes"] = torch.cuda.max_memory_allocated()
  return result


def parity(models: list) -> dict[str, Any]:
  """Returns the largest errors of cuDNN's and of XLA's attention in bfloat16.

  Each error is a share of the largest value of the float32 result: output, and
  gradients by query, key and value. Without a GPU they are only XLA's. What
  fails is in `error`.
  """
  import functools

  import jax
  import jax.numpy as jnp
  import numpy as np

  from vit_jax.families.vit import ViTConfig
  from vit_jax.models import cudnn

  xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")
  has_gpu = jax.default_backend() == "gpu"
  measured: dict[str, Any] = {"cudnn_was_tried": has_gpu}
  errors = []
  for variant, size, _ in models:
    heads = ViTConfig(variant=variant).attention((size, size))
    shape = (4, 2, *heads)
    exact = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    exact = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32)
    with jax.default_matmul_precision("highest"):
      want = cudnn.output_and_gradients(xla, exact[:3], exact[3])
    *inputs, weights = jnp.asarray(exact, jnp.bfloat16)
    for name, fn in {"cudnn": cudnn.attend, "xla": xla}.items():
      if name == "cudnn" and not has_gpu:
        continue
      row = f"{variant}, {size} px: {name}"
      try:
        got = cudnn.output_and_gradients(fn, inputs, weights)
      except Exception as e:  # the others are measured all the same
        errors.append(f"{row}: {type(e).__name__}: {e}"[:500])
        continue
      measured[row] = [
        float(np.max(np.abs(g - w)) / np.max(np.abs(w)))
        for g, w in zip(got, want, strict=True)
      ]
  return measured | ({"error": "; ".join(errors)} if errors else {})


def dtype() -> str:
  """Returns the type of the matrix products: a CPU's are not bfloat16."""
  import jax

  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


SIDES = {f.__name__: f for f in (ours, timm, parity)}


def one_gpu() -> dict[str, str]:
  """Returns the environment in which both sides have one GPU, and all of it.

  timm's step uses one; jax takes three quarters of its memory unless
  XLA_CLIENT_MEM_FRACTION states another share.
  """
  env = dict(os.environ)
  first, *_ = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")
  env["CUDA_VISIBLE_DEVICES"] = first
  if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env:  # the older name
    env.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
  return env


def measured(job: Job, seconds: float) -> dict[str, Any]:
  """Returns what a process of its own measured, or the `error`."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} {job.flags}".strip()
  env = {**one_gpu(), "XLA_FLAGS": flags}
  folders = [str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
  env["PYTHONPATH"] = os.pathsep.join(folders)
  env["TF_CPP_MIN_LOG_LEVEL"] = "3"
  # The error stays the last line: no note of jax's follows it.
  env["JAX_TRACEBACK_FILTERING"] = "off"
  command = [sys.executable, __file__, f"--one={json.dumps(job)}"]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, env=env, timeout=seconds
    )
  except subprocess.TimeoutExpired:
    return {"error": f"took more than the {seconds:.0f} s that were left"}
  if done.returncode:
    return {"error": error(done.stderr) or f"ended: {done.returncode}"}
  return json.loads(done.stdout.splitlines()[-1])


def error(stderr: str) -> str:
  """Returns the error that ended a process: its first line to the last one."""
  text = stderr.strip()
  *_, start = [0, *(m.start() for m in RAISED.finditer(text))]
  return text[start:][:1000] if start else text[-1000:]


def line_text(line: dict[str, Any]) -> str:
  """Returns one line of text of a measurement."""
  measured = line["measured"]
  if "error" in measured:
    return f"FAILED: {measured['error']}"
  if "images_per_second" not in measured:
    return ", ".join(f"{k} {v}" for k, v in measured.items())
  text = f"{measured['images_per_second']:,.1f} images/s"
  if "mfu" in measured:
    text += f", {100 * measured['mfu']:.1f} % of the measured matrix rate"
  if measured.get("attention"):
    text += f", attention by {measured['attention']}"
  if "peak_bytes" in measured:
    text += f", {measured['peak_bytes'] / 2**30:.1f} GiB"
  return f"{text}, compiled in {measured['compile_seconds']:.0f} s"


def ratios(lines: list[dict[str, Any]]) -> Iterator[str]:
  """Yields how our steps compare with timm's."""
  speed = {
    line["name"]: line["measured"].get("images_per_second")
    for line in lines
    if line["group"] == "step"
  }
  for name, rate in speed.items():
    model, _, side = name.rpartition(": ")
    theirs = speed.get(f"{model}: timm")
    if side == "ours" and rate and theirs:
      yield f"{model}: {rate / theirs:.2f} times timm's images/s"


def receipt() -> dict[str, Any]:
  """Returns what every line says of code, versions and machine."""
  import importlib.metadata as metadata

  def text(*command: str) -> str:
    try:
      done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
      return ""
    return done.stdout.strip().replace("\n", "; ")

  versions = {"python": sys.version.split()[0]}
  for name in ("jax", "jaxlib", "flax", "optax", "torch", "timm"):
    try:
      versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      pass
  query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit"
  gpu = text("nvidia-smi", query, "--format=csv,noheader")
  return {
    "commit": text("git", "rev-parse", "HEAD"),
    "versions": versions,
    "machine": f"{gpu or 'no GPU'}; {machine()}",
  }


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--minutes", type=float, default=7.8)
  parser.add_argument("--steps", type=int, default=20, help="timed, of each")
  parser.add_argument("--tiny", action="store_true", help="tiny sizes: a try")
  parser.add_argument("--out", default=str(ROOT / "docs" / "gpu.jsonl"))
  parser.add_argument("--one", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.one:
    job = Job(*json.loads(args.one))
    print(json.dumps(SIDES[job.side](**job.what)))
    return 0
  until = time.monotonic() + 60 * args.minutes
  made, out = receipt(), pathlib.Path(args.out)
  lines = out.read_text().splitlines() if out.exists() else []
  here = [
    line
    for line in map(json.loads, lines)
    if all(line[k] == v for k, v in made.items())
  ]
  last = {line["name"]: line for line in here}  # a later call may mend an error
  done = {n for n, line in last.items() if "error" not in line["measured"]}
  print(made["machine"], flush=True)
  absent = [p for p in ("torch", "timm") if not importlib.util.find_spec(p)]
  if absent:
    print(f"{', '.join(absent)}: not installed, so timm's steps are left out")
  for job in jobs(TINY if args.tiny else MODELS, args.steps):
    if job.side == "timm" and absent:
      continue
    if job.name in done:
      continue
    left = until - time.monotonic()
    if left < LEAST:
      print(f"{job.name}: no time left", flush=True)
      continue
    began = time.monotonic()
    line = {"group": job.group, "name": job.name}
    line["measured"] = measured(job, left)
    line["seconds"] = round(time.monotonic() - began, 1)
    last[job.name] = line | made
    with out.open("a") as file:
      file.write(json.dumps(last[job.name]) + "\n")
    print(f"{job.name}: {line_text(line)} ({line['seconds']} s)", flush=True)
  print(*ratios(list(last.values())), sep="\n")
  return any("error" in line["measured"] for line in last.values())


if __name__ == "__main__":
  sys.exit(main())
