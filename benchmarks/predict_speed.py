"""Compares the speed of `vit-jax predict` and of timm's inference.py.

Both have the same weights, converted to timm's format, and the same JPEG files,
photographs cropped at random to 500x375. They take turns, each in its own
process. Whole processes are timed, from the start to the last line of the
table: seconds on the clock, and processor seconds of all threads and workers,
which other programs disturb less. The difference between two numbers of images
is the cost of the images after compilation.

python benchmarks/predict_speed.py --timm='python <timm>/inference.py'
"""

import argparse
import json
import os
import pathlib
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image
from sklearn import datasets

SIZES = {"Ti/16": "tiny", "S/16": "small", "B/16": "base", "L/16": "large"}
NUM_CLASSES = 1000


def make_images(folder: pathlib.Path, count: int) -> None:
  """Writes JPEG files of 500x375, crops of two photographs."""
  source = pathlib.Path(datasets.__file__).parent / "images"
  photos = [Image.open(source / f"{n}.jpg") for n in ("china", "flower")]
  rng = np.random.default_rng(0)
  (folder / "all").mkdir(parents=True)
  for i in range(count):
    photo = photos[i % 2]
    share, at = rng.uniform(0.5, 1), rng.uniform(0, 1, 2)
    size = np.array(photo.size) * share
    corner = at * (np.array(photo.size) - size)
    box = (*corner, *(corner + size))
    crop = photo.resize((500, 375), Image.Resampling.BICUBIC, box=box)
    crop.save(folder / "all" / f"{i:05}.jpg", quality=90)


def make_weights(model: str, file: pathlib.Path) -> None:
  """Writes random weights of a model under timm's names."""
  code = (
    "import sys, jax, jax.numpy as jnp\n"
    "from vit_jax import weights\n"
    "from vit_jax.tools.exporting import convert\n"
    "from vit_jax.inference import pretrained\n"
    "from vit_jax.config import model_config\n"
    "from vit_jax.models import build\n"
    "model, file, classes = *sys.argv[1:3], int(sys.argv[3])\n"
    "config = model_config(variant=model)\n"
    "images = jnp.zeros((1, 224, 224, 3))\n"
    "params = build(config, classes).init(jax.random.key(0), images)\n"
    "params = params['params']\n"
    "shape = params['head']['kernel'].shape\n"
    "kernel = jax.random.normal(jax.random.key(1), shape)\n"
    "params['head']['kernel'] = kernel\n"
    "convert.convert(pretrained.Pretrained(\n"
    "  config=config, params=params, num_classes=classes,\n"
    "  image_size=(224, 224), class_names=None, ops='decode|resize(224)',\n"
    "  loss='softmax', report=weights.Report('', {}, {}, (), ())),\n"
    "  file, 'timm')\n"
  )
  argv = [sys.executable, "-c", code, model, str(file), str(NUM_CLASSES)]
  subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def timed(argv: list[str], log: pathlib.Path) -> dict[str, float]:
  """Runs a command; returns its wall and CPU seconds, children included."""
  before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
  with log.open("w") as out:
    done = subprocess.run(argv, stdout=out, stderr=out)
  wall = time.monotonic() - start
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  if done.returncode:
    sys.exit(f"{shlex.join(argv)}: failed\n{log.read_text()[-2000:]}")
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return {"wall": wall, "cpu": cpu}


def main() -> None:
  """Prints a JSON line for each number of images, and batch sizes."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--timm", required=True, help="command of inference.py")
  parser.add_argument("--model", default="B/16", choices=SIZES)
  parser.add_argument("--images", type=int, nargs="+", default=[64, 256])
  parser.add_argument("--device", default="cpu", help="timm's: cpu or cuda")
  parser.add_argument("--batch", type=int, default=16, help="ours")
  parser.add_argument("--timm_batch", type=int, default=256, help="timm's")
  parser.add_argument("--pairs", type=int, default=3)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as home:
    base = pathlib.Path(home)
    weights, log = base / "w.safetensors", base / "log"
    make_weights(args.model, weights)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(base / "xla")
    for count in args.images:
      folder = base / str(count)
      make_images(folder, count)
      commands = {
        "ours": f"{sys.executable} -m vit_jax predict {weights} {folder}"
        f" --csv --batch_size={args.batch}",
        "timm": f"{args.timm} --data-dir {folder} --model"
        f" vit_{SIZES[args.model]}_patch16_224 --checkpoint {weights} --device"
        f" {args.device} --num-classes {NUM_CLASSES} --topk 5 --model-kwargs"
        f" act_layer=gelu_tanh -b {args.timm_batch} --results-dir {base}"
        " --no-console-results",
      }
      runs = {name: [] for name in commands}
      for pair in range(args.pairs + 1):  # the first fills caches
        for name, command in commands.items():
          took = timed(shlex.split(command), log)
          runs[name] += [took] if pair else []
      row = {
        "model": args.model,
        "images": count,
        "batch": args.batch,
        "timm_batch": args.timm_batch,
      }
      for name, runs_of_name in runs.items():
        for what in ("wall", "cpu"):
          seconds = [run[what] for run in runs_of_name]
          row[f"{name}_{what}"] = round(statistics.median(seconds), 2)
      for what in ("wall", "cpu"):
        ratios = [
          theirs[what] / ours[what]
          for ours, theirs in zip(runs["ours"], runs["timm"], strict=True)
        ]
        row[f"{what}_ratio"] = round(statistics.median(ratios), 2)
      print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
