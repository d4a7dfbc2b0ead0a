"""Cores that a host needs for its images."""

import dataclasses

import pytest
import tiny

from vit_jax.batch import View
from vit_jax.objectives.objective import Objective
from vit_jax.tools.planning import host_requirements


def _needs(
  ops="decode_inception_crop(16)|flip_lr", dataset="imagenet2012", **k
):
  config = tiny.config(data__ops=ops, data__dataset=dataset)
  return host_requirements.needs(config, 10104.0, 4, "v5e", **k)


def test_cores_are_rounded_up():
  """10,104 images/s of 4 hosts are 2,526 each: exactly twice 1,263."""
  needs = _needs()
  assert needs["input_per_host"] == 2526.0 and needs["input_cores"] == 2
  assert needs["host_vcpus"] == 112
  assert _needs(input_rate=1262.9)["input_cores"] == 3


def test_augmentation_takes_more():
  ops = "decode_inception_crop(16)|flip_lr|randaug(2, 15)"
  needs = _needs(ops)
  assert needs["input_rate"] == 807.0 and needs["input_cores"] == 4
  assert "randaug" in needs["input_rate_of"]


@dataclasses.dataclass(frozen=True)
class Ten(Objective):
  """DINOv2's views: two of 224 px and eight of 96 px."""

  kind: str = "ten"

  trains_head = False

  def views(self, ops):
    crop = "decode|random_resized_crop({})|flip_lr"
    crop += "|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
    large, small = crop.format("224, 0.32, 1.0"), crop.format("96, 0.05, 0.32")
    return {
      "global_1": View(f"{large}|gaussian_blur(1.0)"),
      "global_2": View(f"{large}|gaussian_blur(0.1)|solarize(0.2)"),
      "local": View(f"{small}|gaussian_blur(0.5)", 8),
    }


def test_a_record_costs_what_its_views_cost():
  """DINOv2's views were measured to take 15.24 times as long as a crop."""
  config = tiny.config(data__dataset="imagenet2012")
  config = dataclasses.replace(config, objective=Ten())
  rate, text = host_requirements.rate(config)
  plain = host_requirements.RATES["decode_inception_crop(224)|flip_lr"]
  assert plain / rate == pytest.approx(15.24, rel=0.25) and "times" in text
  needs = host_requirements.needs(config, 10104.0, 4, "v5e")
  assert needs["input_cores"] == -(-2526 // rate)


def test_a_larger_crop_costs_more():
  crop = "decode|random_resized_crop({}, 0.2, 1)|flip_lr"
  slow, plain, fast = (
    _needs(crop.format(size))["input_rate"] for size in (448, 224, 32)
  )
  assert slow < plain / 2 and plain < fast


def test_operations_of_pillow_have_no_rate():
  for ops in ("randaug_timm(9)", "three_augment|color_jitter(0.3)"):
    needs = _needs(f"decode_inception_crop(16)|{ops}")
    assert needs["input_rate"] is None and needs["input_cores"] is None
    first = ops.split("|")[0].split("(")[0]
    assert first in needs["input_rate_of"]


def test_other_images_than_jpegs_have_no_rate():
  needs = _needs(dataset="cifar10")
  assert needs["input_rate"] is None and needs["input_cores"] is None
  assert "--input_rate" in needs["input_rate_of"]
  assert _needs(dataset="cifar10", input_rate=5000.0)["input_cores"] == 1
