"""Processor time of a record's views beside torchvision: `record_views.py`.

The JPEGs are those of `input.py`. Every round measures each variant once, in a
random order, on one core; the numbers are medians over the rounds. DINOv2's
views are two crops of 224 px and eight of 96 px, with its augmentations.
torchvision.transforms.v2 makes them of pictures of Pillow, if it is installed;
its ratio is the median over the rounds. `--parts` measures the operations one
by one, for `vit_jax/tools/planning/host_requirements.py`.
"""

import os

CORES = sorted(os.sched_getaffinity(0))
if __name__ == "__main__":  # before TensorFlow starts
  os.sched_setaffinity(0, CORES[:1])

# ruff: noqa: E402
import io
import random
import statistics
import sys
import time
from collections.abc import Callable

from input import photographs, source  # noqa: I001
from PIL import Image

from vit_jax.batch import View
from vit_jax.data.pipeline import train_batches

ROUNDS = 7
BATCH = 16
BATCHES = 4  # of a round
PLAIN = "decode_inception_crop(224)|flip_lr"
GLOBAL, LOCAL = (224, 0.32, 1.0), (96, 0.05, 0.32)
COLOURS = "flip_lr|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"


def _view(crop, others: str = "", count: int | None = None) -> View:
  return View(f"decode|random_resized_crop{crop}{others}", count)


DINOV2 = {
  "global_1": _view(GLOBAL, f"|{COLOURS}|gaussian_blur(1.0)"),
  "global_2": _view(GLOBAL, f"|{COLOURS}|gaussian_blur(0.1)|solarize(0.2)"),
  "local": _view(LOCAL, f"|{COLOURS}|gaussian_blur(0.5)", 8),
}
# Eight crops of a record; the first is what the others add to.
PARTS = (
  "",
  "|jitter(0.4, 0.4, 0.2, 0.1, 1.0)",
  "|random_grey(1.0)",
  "|gaussian_blur(1.0)",
  "|solarize(1.0)",
)


def torchvision_views() -> Callable[[bytes], list] | None:
  """Returns a function JPEG -> DINOv2's views by torchvision, uint8 tensors."""
  try:
    import torch
    from torchvision.transforms import v2
  except (ImportError, RuntimeError):  # absent, or of another torch
    return None
  torch.set_num_threads(1)

  def view(crop, *others):
    size, *scale = crop
    colours = v2.ColorJitter(0.4, 0.4, 0.2, 0.1)
    return v2.Compose(
      [
        v2.RandomResizedCrop(
          size, scale, interpolation=v2.InterpolationMode.BICUBIC
        ),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([colours], 0.8),
        v2.RandomGrayscale(0.2),
        *others,
        v2.PILToTensor(),
      ]
    )

  def blur(p):
    return v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], p)

  views = [
    view(GLOBAL, blur(1.0)),
    view(GLOBAL, blur(0.1), v2.RandomSolarize(128, 0.2)),
    *[view(LOCAL, blur(0.5))] * 8,
  ]

  def views_of(jpeg):
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    return [make(image) for make in views]

  return views_of


def settle() -> None:
  """Waits until all buffers of batches are full."""
  while True:
    start = time.process_time()
    time.sleep(0.1)
    if time.process_time() - start < 0.002:
      return


def milliseconds(run: Callable[[], object], records: int) -> float:
  """Returns the processor time of a record."""
  settle()
  start = time.process_time()
  run()
  settle()  # the batches that were taken are replaced
  return (time.process_time() - start) / records * 1000


def main(variants: dict) -> None:
  """Prints the times."""
  records = BATCH * BATCHES
  runs, images = {}, source(64)

  def taken(iterator):
    return lambda: [next(iterator) for _ in range(BATCHES)]

  for name, views in {"one image, " + PLAIN: PLAIN, **variants}.items():
    iterator = train_batches(images, views, batch_size=BATCH, seed=0)
    next(iterator)  # builds the graph
    runs[name] = taken(iterator)
  made = torchvision_views() if "DINOv2" in variants else None
  if made:
    jpegs = photographs(records)
    runs["DINOv2, torchvision"] = lambda: [made(jpeg) for jpeg in jpegs]
  times = {name: [] for name in runs}
  for _ in range(ROUNDS):
    for name in random.sample([*runs], len(runs)):
      times[name].append(milliseconds(runs[name], records))
  first = next(iter(times))
  print(f"load {os.getloadavg()[0]:.1f}\n{'':50}  ms a record  images of 224")
  for name, row in times.items():
    ratios = [a / b for a, b in zip(row, times[first], strict=True)]
    print(
      f"{name:50}  {statistics.median(row):11.2f}"
      f"  {statistics.median(ratios):13.2f}"
    )
  if made:
    pairs = zip(times["DINOv2, torchvision"], times["DINOv2"], strict=True)
    ratios = sorted(a / b for a, b in pairs)
    print(
      f"images per busy core: {statistics.median(ratios):.2f} times"
      f" torchvision's ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
  if "--parts" in sys.argv:
    crops = {
      f"8 of {crop[0]}{part}": {"x": _view(crop, part, 8)}
      for crop in (GLOBAL, LOCAL)
      for part in PARTS
    }
    main({"decoding alone": "decode|central_crop(96)", **crops})
  else:
    main({"DINOv2": DINOV2})
