"""Rates of devices, by the names that jax gives them."""

import pytest

from vit_jax import devices
from vit_jax.devices import peak_flops, unknown_peak
from vit_jax.models.chip_choices import CHOICES

# Names that one pattern may take for another's; dense bfloat16, TFLOP/s.
KINDS = {
  "TPU v3": 123 / 2,  # a device is a core, half a chip
  "TPU v5": 459,
  "TPU v5 lite": 197,
  "TPU7x": 2307 / 2,
  "A100-SXM4-40GB": 312,  # by drivers before 470
  "NVIDIA A10": 125,
  "NVIDIA A10G": 70,
  "NVIDIA L4": 242 / 2,  # "with sparsity"
  "NVIDIA L40": 181.05,
  "NVIDIA L40S": 362.05,
  "NVIDIA H100 80GB HBM3": 1979 / 2,
  "NVIDIA H100 PCIe": 1513 / 2,
  "NVIDIA GH200 144G HBM3e": 1979 / 2,
}
UNKNOWN = (
  "cpu",
  "TPU v4 lite",
  "NVIDIA H100",
  "NVIDIA H100 80GB HBM3 MIG 3g.40gb",  # a part of it
  "NVIDIA L400",
  "Tesla T4",  # no bfloat16
)


def test_peaks_are_those_of_whole_names():
  peaks = {kind: peak_flops(kind) for kind in KINDS}
  assert peaks == pytest.approx({k: v * 1e12 for k, v in KINDS.items()})
  assert [*map(peak_flops, UNKNOWN)] == [None] * len(UNKNOWN)


def test_choices_by_chip_are_of_chips_that_are_known():
  of_chips = devices.OPTIONS, devices.FEW_HIDDEN, devices.SPLIT_BY_HEADS
  named = {*devices.MAX_HIDDEN, *CHOICES}.union(*of_chips)
  assert named == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
  assert named < {*devices.CHIPS} == {*devices.GENERATIONS.values()}
  assert devices.generation("TPU v6 lite") == "v6e"


def test_why_there_is_no_mfu():
  assert "'Tesla T4'" in unknown_peak("Tesla T4")
  assert unknown_peak("NVIDIA L4") == unknown_peak("cpu") == ""
