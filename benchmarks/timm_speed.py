"""Compares a training step with timm's: `benchmarks/timm_speed.py --help`.

Both do the same work on the same device: random uint8 images on the device,
normalised in the step; softmax loss over 1000 classes; gradients clipped to a
norm of 1; AdamW. Ours is `vit-jax benchmark`. timm's uses torch.compile and
bfloat16 autocast on a GPU, and is eager in float32 on a CPU. They take turns,
each in its own process with its own memory. The models differ in the GELU, tanh
here and erf in timm. Needs torch and timm, but no TensorFlow.

python benchmarks/timm_speed.py --model=L/16 --batch=128
python benchmarks/timm_speed.py --model=Ti/16 --size=32 --batch=4 --steps=4
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SIZES = {
  "Ti/16": "tiny_patch16",
  "S/16": "small_patch16",
  "B/16": "base_patch16",
  "L/16": "large_patch16",
  "H/14": "huge_patch14",
}
NUM_CLASSES = 1000
LR, DECAY, CLIP = 1e-3, 0.1, 1.0


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


def timm_step(model: str, size: int, batch: int, device: str) -> Callable:
  """Returns a function that trains timm's model by one step, not waiting."""
  import torch
  import torch_libraries

  timm = torch_libraries.load("timm")
  torch.manual_seed(0)
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  is_gpu = device == "cuda"
  network = timm.create_model(
    f"vit_{SIZES[model]}_224", img_size=size, num_classes=NUM_CLASSES
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


def measure_timm(args: argparse.Namespace) -> dict:
  """Times timm's step as `vit_jax.tools.benchmark` times ours."""
  import torch

  device = "cuda" if torch.cuda.is_available() else "cpu"
  step = timm_step(args.model, args.size, args.batch, device)
  block = min(args.steps, max(5, args.steps // 10))
  warmup, ends, waiting = max(3, block), [], collections.deque()
  ahead = 2 if device == "cuda" else 0  # a CPU has done a step at its return

  def see_end_of_first():
    event = waiting.popleft()
    if event is not None:
      event.synchronize()
    ends.append(time.perf_counter())

  start = time.perf_counter()
  step().item()
  first_seconds = time.perf_counter() - start
  for _ in range(warmup + args.steps // block * block):
    step()
    waiting.append(torch.cuda.Event() if device == "cuda" else None)
    if waiting[-1] is not None:
      waiting[-1].record()
    if len(waiting) > ahead:
      see_end_of_first()
  while waiting:
    see_end_of_first()
  at = ends[warmup - 1 :: block]
  seconds = [(b - a) / block for a, b in itertools.pairwise(at)]
  result = {"step_seconds": statistics.median(seconds)}
  result |= {"compile_seconds": first_seconds, "torch": torch.__version__}
  result["images_per_second"] = args.batch / result["step_seconds"]
  if device == "cuda":
    result["device"] = torch.cuda.get_device_name()
    result["peak_bytes"] = torch.cuda.max_memory_allocated()
  return result


def measure_ours(args: argparse.Namespace) -> dict:
  """Times our step."""
  import jax

  from vit_jax import malloc
  from vit_jax.tools import benchmark

  malloc.reuse_freed_memory()
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  config = our_config(args.model, args.size, args.batch, dtype)
  return benchmark.measure(config, steps=args.steps)


SIDES = {"ours": measure_ours, "timm": measure_timm}


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", choices=SIZES, default="B/16")
  parser.add_argument("--size", type=int, default=224, help="pixels of a side")
  parser.add_argument("--batch", type=int, default=256, help="images a step")
  parser.add_argument("--steps", type=int, default=30, help="timed, in a turn")
  parser.add_argument("--rounds", type=int, default=3, help="turns of each")
  parser.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
  return parser.parse_args()


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


def turn(side: str) -> dict:
  """Measures one side in its own process."""
  root = pathlib.Path(__file__).resolve().parents[1]
  env = one_gpu()
  env["PYTHONPATH"] = f"{root}:{env.get('PYTHONPATH', '')}"
  done = subprocess.run(
    [sys.executable, __file__, *sys.argv[1:], f"--only={side}"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
    env=env,
  )
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  args = arguments()
  if args.only:
    print(json.dumps(SIDES[args.only](args)))
    return
  ratios = []
  for number in range(args.rounds):
    results = {side: turn(side) for side in SIDES}
    for side, result in results.items():
      print(json.dumps({"side": side, "round": number, **result}), flush=True)
    seconds = {side: result["step_seconds"] for side, result in results.items()}
    ratios.append(seconds["timm"] / seconds["ours"])
  print(
    f"{args.model}, {args.size} px, batch {args.batch}: ours is"
    f" {statistics.median(ratios):.2f} times as fast as timm, the median of"
    f" {args.rounds} rounds ({min(ratios):.2f} to {max(ratios):.2f})"
  )


if __name__ == "__main__":
  main()
