"""Rates of devices, by the names that jax gives them."""

import pytest

from vit_jax import devices
from vit_jax.models.chip_choices import CHOICES

# Names that one pattern may take for another's; dense bfloat16, TFLOP/s.
KINDS = {
  "TPU v3": 123 / 2,  # a device is a core, half a chip
  "TPU v5": 459,
  "TPU v5 lite": 197,
  "TPU7x": 2307 / 2,
  "A100-SXM4-40GB": 312,  # by drivers before 470
  "NVIDIA A10G": 70,
  "NVIDIA L4": 242 / 2,  # "with sparsity"
  "NVIDIA L40S": 362.05,
  "NVIDIA H100 80GB HBM3": 1979 / 2,
  "NVIDIA GH200 144G HBM3e": 1979 / 2,
  "cpu": None,
  "TPU v4 lite": None,
  "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,  # a part of it
  "NVIDIA L400": None,
  "Tesla T4": None,  # no bfloat16
}


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_those_of_whole_names(kind):
  peak = KINDS[kind] and pytest.approx(KINDS[kind] * 1e12)
  assert devices.peak_flops(kind) == peak
  is_explained = peak is None and kind != "cpu"
  assert (repr(kind) in devices.unknown_peak(kind)) == is_explained


def test_choices_by_chip_are_of_chips_that_are_known():
  of_chips = devices.OPTIONS, devices.FEW_HIDDEN, devices.SPLIT_BY_HEADS
  named = {*devices.MAX_HIDDEN, *CHOICES}.union(*of_chips)
  assert named < {*devices.CHIPS} == {*devices.GENERATIONS.values()}
  assert devices.generation("TPU v6 lite") == "v6e"
