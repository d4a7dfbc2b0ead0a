"""Training of the head, or of the last blocks, with and without activations
that are computed once: `python benchmarks/frozen_features.py`.

Weights are random, images are JPEGs of noise, batches have 32 images. After
every epoch a tenth as many images are evaluated. Each run has its own process.
The columns are the processor seconds (all threads) from the ready state to the
end of the first step, which include the pass over the images and the
compilation; those from there to the last score; the seconds on the clock of
both; and the last loss, which shows that the runs are the same.

python benchmarks/frozen_features.py [MODEL IMAGES EPOCHS] [--once]

The default is S/16, 100 images, 8 epochs; --once leaves out the ordinary runs.
"""

import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from machine import machine
from PIL import Image

PIXELS, BATCH, CLASSES = 224, 32, 5
TRAINED = "the head", "the last half of the blocks"


def write_images(folder: pathlib.Path, num_images: int) -> None:
  """Writes JPEGs of 256 x 256 pixels, and a tenth as many to choose by."""
  rng = np.random.default_rng(0)
  for split, num in (("train", num_images), ("val", max(10, num_images // 10))):
    for i in range(num):
      coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
      stream = io.BytesIO()
      Image.fromarray(coarse).resize((256, 256)).save(stream, "jpeg")
      path = folder / split / f"class_{i % CLASSES}" / f"{i}.jpg"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(stream.getvalue())


def run(
  folder: str, model: str, epochs: int, trained: str, is_once: bool
) -> dict:
  """Trains in this process; returns the columns."""
  # Only in the processes that train.
  from vit_jax.callbacks import Callback
  from vit_jax.config import defaults, freeze
  from vit_jax.families import family
  from vit_jax.finetune import frozen
  from vit_jax.train import train_and_evaluate

  if not is_once:
    frozen.part_of = lambda *_: None
  c = defaults()
  c.model.variant = model
  c.model.name = family(model)
  c.data.dataset, c.data.split = f"folder:{folder}", "train"
  c.data.ops = f"decode|resize({PIXELS})"
  c.data.batch_size, c.total_epochs = BATCH, float(epochs)
  c.optim.name, c.optim.lr, c.optim.microbatch = "sgd", 0.003, 16
  config = freeze(c)
  body = ("embedding/*", "cls", "Transformer/*")
  if trained != TRAINED[0]:
    half = config.model.size.depth // 2
    blocks = (f"Transformer/encoderblock_{i}/*" for i in range(half))
    body = (*body[:2], "Transformer/posembed_input/*", *blocks)
  c.optim.freeze = body
  num = len([*pathlib.Path(folder).glob("train/*/*")])
  epoch = max(1, num // BATCH)
  c.log_steps, c.checkpoint.every_steps = epoch, 0
  c.evals = {
    "val": {
      "kind": "classification",
      "split": "val",
      "ops": c.data.ops,
      "every_steps": epoch,
    }
  }
  marks = []

  class Marks(Callback):
    def on_start(self, start, state, saved):
      self.mark()

    def on_step(self, step, batch, metrics):
      if step == 1:
        metrics["loss"].block_until_ready()
        self.mark()

    def on_log(self, step, values):
      self.loss = values["loss"]
      return values

    def on_end(self, state):
      self.mark()

    def mark(self):
      marks.append((time.process_time(), time.monotonic()))

  callback = Marks()
  with tempfile.TemporaryDirectory() as workdir:
    train_and_evaluate(freeze(c), workdir, callbacks=[callback])
  (cpu_0, wall_0), (cpu_1, wall_1), (cpu_2, wall_2) = marks
  return {
    "first": cpu_1 - cpu_0,
    "rest": cpu_2 - cpu_1,
    "clock": (wall_1 - wall_0, wall_2 - wall_1),
    "loss": callback.loss,
  }


def main(model: str, num_images: int, epochs: int, is_once: bool) -> None:
  """Prints the table."""
  print(machine())
  print(f"{model}, {num_images:,} images of {PIXELS} px, {epochs} epochs")
  print(
    "| trained | frozen part | to the first step, s | the rest, s | both, s"
    " | clock, s | last loss |\n|---|---|---:|---:|---:|---:|---:|"
  )
  with tempfile.TemporaryDirectory() as folder:
    write_images(pathlib.Path(folder), num_images)
    for trained in TRAINED:
      for once in (True,) if is_once else (False, True):
        args = [folder, model, str(epochs), trained, str(int(once))]
        done = subprocess.run(
          [sys.executable, __file__, "--run", *args],
          capture_output=True,
          text=True,
        )
        if done.returncode:
          sys.exit(done.stderr)
        row = json.loads(done.stdout.splitlines()[-1])
        print(
          f"| {trained} | {'once' if once else 'in every step'} |"
          f" {row['first']:.1f} | {row['rest']:.1f} |"
          f" {row['first'] + row['rest']:.1f} | {sum(row['clock']):.0f} |"
          f" {row['loss']:.6f} |",
          flush=True,
        )
        for line in done.stderr.splitlines():
          if line.startswith("frozen"):
            print(f"  {line}", file=sys.stderr)


if __name__ == "__main__":
  argv = [word for word in sys.argv[1:] if word != "--once"]
  if argv[:1] == ["--run"]:
    folder_, model_, epochs_, trained_, once_ = argv[1:]
    print(
      json.dumps(run(folder_, model_, int(epochs_), trained_, once_ == "1"))
    )
  else:
    model_, images_, epochs_ = argv or ("S/16", "100", "8")
    main(model_, int(images_), int(epochs_), "--once" in sys.argv)
