"""Rates of devices, by the names that jax gives them."""

import re
import types

import pytest
import tiny

from vit_jax import chips, overview
from vit_jax.chips import peak_flops

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
  for pattern in chips.PEAK_FLOPS:
    assert any(re.fullmatch(pattern, kind) for kind in KINDS)


@pytest.mark.parametrize(
  "platform, kind, told",
  [
    ("gpu", "Tesla T4", True),
    ("gpu", "NVIDIA L4", False),
    ("cpu", "cpu", False),
  ],
)
def test_a_run_says_why_it_shows_no_mfu(monkeypatch, platform, kind, told):
  config = tiny.config(data__dataset="cifar10", num_classes=10)
  parts = tiny.Parts(config)
  monkeypatch.setattr(overview, "_attention", lambda *_: "")
  device = types.SimpleNamespace(platform=platform, device_kind=kind)
  devices = types.SimpleNamespace(flat=[device])
  mesh = types.SimpleNamespace(shape=parts.mesh.shape, devices=devices)
  source = types.SimpleNamespace(num_examples=100, num_classes=10)
  lines = overview.text(
    config, mesh, source, parts.shapes.params, 20, "runs/x"
  ).splitlines()
  expected = (
    "MFU         not shown: no bfloat16 rate of 'Tesla T4' is known"
    " (vit_jax/chips.py)"
  )
  assert (lines[-1] == expected) == told
