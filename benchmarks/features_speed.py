"""Compares the speed of features of photographs on a CPU.

All variants have the same random float32 weights, images in memory, batch size
and number of threads. Each runs in its own process, in turns. A turn is a
number of batches of one variant, from uint8 [b, h, w, 3] to float32 features on
the host. The variants:

  ours      vit_jax in float32
  ours16    in bfloat16, the choice of `vit-jax predict` on CPUs with
            instructions for it (jax 0.12 or later)
  timm      timm's model, eager
  compiled  timm's model with torch.compile
  ort       onnxruntime with the file of `vit-jax convert --to=onnx`
  ort_timm  onnxruntime with the file that torch.onnx writes for timm's model

The table has medians over the turns: milliseconds per image on the clock and of
processor time (all threads); the ratio of processor time to that of the first
variant in the same turn; and the largest difference to timm's features, as a
share of the largest feature.

python benchmarks/features_speed.py --model=dinov3_s
python benchmarks/features_speed.py --only ours timm --threads=1 --turns=3
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
import numpy as np
import turns

# Name here -> timm's name, pixels of a side, mean and deviation of pixels.
HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MODELS = {
  "b16": ("vit_base_patch16_224", 224, HALF, HALF),
  "dinov3_s": ("vit_small_patch16_dinov3_qkvb", 256, *IMAGENET),
  "ti16": ("vit_tiny_patch16_224", 224, HALF, HALF),
}
WEIGHTS, ONNX, TIMM_ONNX = "w.safetensors", "ours.onnx", "timm.onnx"
FN = Callable[[np.ndarray], np.ndarray]


def timm_model(model: str, home: pathlib.Path):
  """Returns timm's model with the weights of the folder, for evaluation."""
  import torch
  import torch_libraries
  from safetensors.torch import load_file

  timm = torch_libraries.load("timm")
  name = MODELS[model][0]
  network = timm.create_model(name, num_classes=0, global_pool="token").eval()
  if (home / WEIGHTS).exists():
    network.load_state_dict(load_file(home / WEIGHTS))
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  return network


def make_files(model: str, home: pathlib.Path, only: list[str]) -> None:
  """Writes random weights, and the files that the variants read."""
  import torch
  from safetensors.torch import save_file

  torch.manual_seed(0)
  network = timm_model(model, home)
  with torch.no_grad():
    for name, value in network.named_parameters():
      if "gamma" in name:  # layer scale: 1e-5 at first, which hides the blocks
        value.uniform_(0.1, 1)
      elif value.ndim == 1:  # scales and biases
        value.add_(0.1 * torch.randn_like(value))
  save_file(network.state_dict(), home / WEIGHTS)
  if "ort" in only:
    subprocess.run(
      [sys.executable, "-m", "vit_jax", "convert", home / WEIGHTS]
      + [home / ONNX, "--to=onnx"],
      check=True,
      stdout=subprocess.DEVNULL,
    )
  if "ort_timm" in only:
    from timm.layers import set_fused_attn

    side = MODELS[model][1]
    set_fused_attn(False)  # torch's own cannot be exported
    torch.onnx.export(
      timm_model(model, home),
      (torch.zeros(2, 3, side, side),),
      home / TIMM_ONNX,
      input_names=["images"],
      dynamic_axes={"images": {0: "b"}},
      opset_version=17,
      dynamo=False,
    )


def ours(model: str, home: pathlib.Path, dtype: str = "float32") -> FN:
  """Returns the function of ours."""
  import dataclasses

  import vit_jax
  from vit_jax.batch import normalise

  vit = vit_jax.load(home / WEIGHTS, verbose=False)
  config = dataclasses.replace(vit.config, dtype=dtype)
  vit = dataclasses.replace(vit, config=config)

  def features(images):
    return np.asarray(vit._layer(vit.params, normalise(images), "pre_logits"))

  return features


def of_timm(model: str, home: pathlib.Path, compiled: bool = False) -> FN:
  """Returns the function of timm's model."""
  import torch

  network = timm_model(model, home)
  call = torch.compile(network) if compiled else network

  mean, std = (255 * torch.tensor(x) for x in MODELS[model][2:])

  @torch.inference_mode()
  def features(images):
    x = (torch.from_numpy(images).float() - mean) / std
    return call(x.permute(0, 3, 1, 2)).numpy()

  return features


def of_onnxruntime(model: str, home: pathlib.Path, is_timms: bool) -> FN:
  """Returns the function of onnxruntime."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = len(os.sched_getaffinity(0))
  session = onnxruntime.InferenceSession(
    home / (TIMM_ONNX if is_timms else ONNX),
    options,
    providers=["CPUExecutionProvider"],
  )

  mean, std = MODELS[model][2:] if is_timms else (HALF, HALF)
  mean, std = (255 * np.array(x, np.float32) for x in (mean, std))

  def features(images):
    x = (images.astype(np.float32) - mean) / std
    if is_timms:
      x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return session.run(None, {"images": x})[0]

  return features


VARIANTS = {
  "ours": ours,
  "ours16": lambda m, h: ours(m, h, "bfloat16"),
  "timm": of_timm,
  "compiled": lambda m, h: of_timm(m, h, compiled=True),
  "ort": lambda m, h: of_onnxruntime(m, h, is_timms=False),
  "ort_timm": lambda m, h: of_onnxruntime(m, h, is_timms=True),
}


def serve(args: argparse.Namespace) -> None:
  """Answers a line of the input with the times of a turn."""
  home, side = pathlib.Path(args.serve[1]), MODELS[args.model][1]
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (args.batch, side, side, 3), np.uint8)
  features = VARIANTS[args.serve[0]](args.model, home)
  np.save(home / f"{args.serve[0]}.npy", features(images))
  features(images)
  for _ in sys.stdin:
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(args.batches):
      features(images)
    wall, busy = time.perf_counter() - start, time.process_time() - busy
    print(wall, busy, flush=True)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="b16", choices=MODELS)
  parser.add_argument("--batch", type=int, default=16, help="images of a call")
  parser.add_argument("--batches", type=int, default=2, help="of a turn")
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--threads", type=int, default=2, help="cores in use")
  parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS)
  parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))[: args.threads]
  os.sched_setaffinity(0, cores)
  if args.serve:
    return serve(args)
  times_by_name = {name: [] for name in args.only}
  with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
    home, servers = pathlib.Path(home), {}
    make_files(args.model, home, [*args.only])
    for name in args.only:
      command = [sys.executable, __file__, *sys.argv[1:], "--serve", name, home]
      servers[name] = server = stack.enter_context(turns.start(command))
      turns.ask(server)  # so that none compiles while another is timed
    for _ in range(args.turns):
      for name, server in servers.items():
        times = turns.ask(server)
        times_by_name[name].append(
          [1e3 * t / args.batch / args.batches for t in times]
        )
    results = {n: np.load(home / f"{n}.npy") for n in servers}
  _print(args, times_by_name, results)


def _print(
  args: argparse.Namespace, times_by_name: dict, results: dict
) -> None:
  from machine import machine

  print(
    f"{args.model}, batches of {args.batch}, {args.threads} threads,"
    f" {machine()}, load {os.getloadavg()[0]:.1f}"
  )
  print(f"{'':10}{'ms':>8}{'busy ms':>9}{'ratio':>7}{'range':>13}{'error':>9}")
  first = next(iter(times_by_name.values()))
  exact = results.get("timm", next(iter(results.values())))
  for name, times in times_by_name.items():
    wall, busy = (statistics.median(t[k] for t in times) for k in (0, 1))
    ratios = [a[1] / b[1] for a, b in zip(times, first, strict=True)]
    error = np.abs(results[name] - exact).max() / np.abs(exact).max()
    print(
      f"{name:10}{wall:8.1f}{busy:9.1f}{statistics.median(ratios):7.2f}"
      f"{min(ratios):6.2f}-{max(ratios):.2f}{error:11.1e}"
    )


if __name__ == "__main__":
  main()
