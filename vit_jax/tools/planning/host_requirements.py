"""The host cores that decode images as fast as the chips need them."""

import math
from typing import Any

from vit_jax.config import Config
from vit_jax.data import dataset_info, preprocessing

# Images per second of one busy core, from JPEGs like ImageNet's to batches of
# 224 px: docs/receipts.jsonl, "input_quiet". Other operations cost little.
RATES = {
  "decode_inception_crop(224)|flip_lr": 1263.0,
  "decode_inception_crop(224)|flip_lr|randaug(2, 15)": 807.0,
}
MACHINE = "AMD EPYC (Zen 4)"
# What a record with several views costs, in images of the first rate, measured
# in turns with it: docs/receipts.jsonl, "input_views". A whole image is decoded
# once. Each operation has two numbers: for a crop of 224 px, and of 96 px.
DECODED = 0.9
COSTS = {
  "random_resized_crop": (1.75, 0.51),
  "jitter": (1.8, 0.46),
  "random_grey": (0.08, 0.02),
  "gaussian_blur": (0.5, 0.17),
  "solarize": (0.11, 0.03),
  "flip_lr": (0.0, 0.0),
}
_AREAS = 224**2, 96**2
# Operations of Pillow, which take several times as long as the measured ones.
UNMEASURED = ("three_augment", "color_jitter", "randaug_timm")
# vCPUs (hardware threads, two to a core) of a host with four chips; other chips
# are not documented. Source: cloud.google.com/tpu/docs, pages on v5e and TPU7x.
VCPUS = {"v5e": 112, "v5p": 208, "v6e": 180, "tpu7x": 224}


def rate(config: Config) -> tuple[float | None, str]:
  """Returns the images per second of one core, and how they were measured.

  Returns:
    (rate, text). The rate is that of records, whatever the number of their
    crops. It is None if none was measured, which is so for images other than
    JPEGs and for `UNMEASURED` operations; the text says why. Crops whose
    operations are not in `COSTS` count as images: the rate is lower than the
    true one, since the image is decoded once.
  """
  known = dataset_info.lookup(config.data.dataset)
  if known and known.image != "jpeg":
    return None, f"no rate is measured for {known.image}; give --input_rate"
  views = config.views
  texts = [view.ops for view in views.values()]
  names = {op.name for text in texts for op in preprocessing.parse_ops(text)}
  if slow := [name for name in UNMEASURED if name in names]:
    return None, (
      f"no rate is measured for {', '.join(slow)}, which Pillow computes; give"
      " --input_rate"
    )
  plain, augmented = RATES
  if names <= {"decode", *COSTS}:
    images = DECODED + sum(
      (view.count or 1) * _cost(view.ops) for view in views.values()
    )
    return RATES[plain] / images, (
      f"{images:.1f} times the work of {plain}, measured on {MACHINE}"
    )
  ops = augmented if any("randaug" in text for text in texts) else plain
  measured = f"as measured with {ops} on {MACHINE}"
  if (crops := preprocessing.num_crops(views)) > 1:
    measured += f", divided by the {crops} crops of an image"
  return RATES[ops] / crops, measured


def _cost(text: str) -> float:
  """Returns what a crop costs, in images of the first rate."""
  ops, cost = preprocessing.parse_ops(text), 0.0
  for op, shape in zip(ops, preprocessing.shapes(text), strict=True):
    if op.name == "decode":
      continue
    height, width = shape
    large, small = COSTS[op.name]
    slope = (large - small) / (_AREAS[0] - _AREAS[1])
    share = op.arguments.get("p", 1)
    cost += share * max(0.0, small + slope * (height * width - _AREAS[1]))
  return cost


def needs(
  config: Config,
  images_per_second: float,
  num_hosts: int,
  generation: str,
  input_rate: float | None = None,
) -> dict[str, Any]:
  """Returns the cores that each host needs for its share of the images.

  Args:
    config: The run.
    images_per_second: Rate of the whole slice.
    num_hosts: Number of hosts; each reads an equal share.
    generation: Kind of chip, such as "v5e".
    input_rate: Images per second of one core; None: see `rate`.

  Returns:
    hosts; input_per_host, images per second of a host; input_rate, images per
    second of a core; input_rate_of, how the rate was measured; input_cores,
    whole cores that each host needs; host_vcpus. Unknown values are None.
  """
  core_rate, source = (input_rate, "as given") if input_rate else rate(config)
  per_host = images_per_second / num_hosts
  return {
    "hosts": num_hosts,
    "input_per_host": per_host,
    "input_rate": core_rate,
    "input_rate_of": source,
    "input_cores": core_rate and math.ceil(per_host / core_rate),
    "host_vcpus": VCPUS.get(generation),
  }
