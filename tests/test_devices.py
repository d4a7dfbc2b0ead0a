"""Rates of devices, by the names that jax gives them."""

import re

import pytest

from vit_jax import devices
from vit_jax.devices import peak_flops, unknown_peak
from vit_jax.models.chip_choices import CHOICES

# Dense bfloat16, TFLOP/s.
KINDS = {
  "TPU v2": 45 / 2,  # a device is a core, half a chip
  "TPU v3": 123 / 2,
  "TPU v4": 275,
  "TPU v5 lite": 197,
  "TPU v5": 459,
  "TPU v5p": 459,
  "TPU v6 lite": 918,
  "TPU7x": 2307 / 2,
  "NVIDIA A100-SXM4-40GB": 312,
  "A100-SXM4-40GB": 312,  # by drivers before 470
  "NVIDIA A100-PCIE-40GB": 312,
  "NVIDIA A100 80GB PCIe": 312,
  "NVIDIA A10": 125,
  "NVIDIA A10G": 70,
  "NVIDIA A30": 165,
  "NVIDIA L4": 242 / 2,  # "with sparsity"
  "NVIDIA L40": 181.05,
  "NVIDIA L40S": 362.05,
  "NVIDIA H100 80GB HBM3": 1979 / 2,
  "NVIDIA H100 PCIe": 1513 / 2,
  "NVIDIA H100 NVL": 1671 / 2,
  "NVIDIA H200": 1979 / 2,
  "NVIDIA H200 NVL": 1671 / 2,
  "NVIDIA GH200 480GB": 1979 / 2,
  "NVIDIA GH200 144G HBM3e": 1979 / 2,
  "NVIDIA B200": 4500 / 2,
  "NVIDIA B300": 4500 / 2,
  "NVIDIA GB200": 5000 / 2,
}
UNKNOWN = (
  "cpu",
  "TPU v4 lite",
  "TPU v9",
  "NVIDIA H100",
  "NVIDIA H800",
  "NVIDIA H100 80GB HBM3 MIG 3g.40gb",  # a part of it
  "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
  "NVIDIA L400",
  "Tesla V100-SXM2-16GB",  # no bfloat16
  "Tesla T4",
  "AMD Instinct MI300X",
)


@pytest.mark.parametrize("kind", KINDS)
def test_peak(kind):
  assert peak_flops(kind) == pytest.approx(KINDS[kind] * 1e12, rel=1e-9)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_is_not_guessed(kind):
  assert peak_flops(kind) is None


def test_every_entry_is_tested():
  for pattern in devices.PEAK_FLOPS:
    assert any(re.fullmatch(pattern, kind) for kind in KINDS)


def test_generations():
  names = {k: devices.generation(k) for k in (*KINDS, *UNKNOWN) if "TPU" in k}
  assert {k: v for k, v in names.items() if k != v} == {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
  }


def test_choices_by_chip_are_of_chips_that_are_known():
  named = {
    *devices.OPTIONS,
    *devices.FEW_HIDDEN,
    *devices.SPLIT_BY_HEADS,
    *devices.MAX_HIDDEN,
    *CHOICES,
  }
  assert named == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
  assert named < {*devices.CHIPS} == {*devices.GENERATIONS.values()}


def test_why_there_is_no_mfu():
  assert unknown_peak("Tesla T4") == (
    "no bfloat16 rate of 'Tesla T4' is known (vit_jax/devices.py)"
  )
  assert unknown_peak("NVIDIA L4") == unknown_peak("cpu") == ""
