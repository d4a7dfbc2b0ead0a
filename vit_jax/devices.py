"""Rates of chips, as their makers state them, and options of TPU compilers.

Sources: `CHIPS` names them; for GPUs, the data sheets of NVIDIA. Compiler
  options: benchmarks/notes/performance_log.md.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device as jax counts them: a chip, or half a chip of v3 and TPU7x.

  Attributes:
    peak_flops: Dense bfloat16, FLOP/s.
    hbm_bandwidth: Bytes/s of the main memory.
    clock: Clock of the matrix unit, Hz.
    ici_bandwidth: All links between chips, one way, bytes/s.
    dcn_bandwidth: A chip's share of the data centre's network, bytes/s; None if
      the maker does not state it.
    capacity: Memory that libtpu 0.0.50 leaves to a program, bytes.
    share: Share of a chip that the device is.
  """

  peak_flops: float
  hbm_bandwidth: float
  clock: float
  ici_bandwidth: float
  dcn_bandwidth: float | None
  capacity: int
  share: float = 1.0


# Sources, read on 2026-11-28: the pages v3, v4, v5e, v5p, v6e and tpu7x of
# docs.cloud.google.com/tpu/docs. Links: half of the bandwidth of both
# directions, which all state but v3 and v4; for v3, of the all-reduces over a
# pod. v4's memory and links are from a former page: today's has 1,200 GB/s, and
# no links. Network of v5e and v6e: a pod's, divided by its 256 chips. Clocks
# follow from the peak, with four matrix units a core (v3: two) of 128 x 128
# cells, or of 256 x 256 on v6e and TPU7x.
CHIPS = {
  "v3": Chip(
    61.5e12, 450e9, 0.94e9, 164e9, None, int(15.48 * 2**30), share=0.5
  ),
  "v4": Chip(275e12, 1228e9, 1.05e9, 300e9, None, int(30.75 * 2**30)),
  "v5e": Chip(197e12, 819e9, 1.50e9, 200e9, 3.125e9, int(15.75 * 2**30)),
  "v5p": Chip(459e12, 2765e9, 1.75e9, 600e9, 6.25e9, int(95.73 * 2**30)),
  "v6e": Chip(918e12, 1638e9, 1.75e9, 400e9, 12.5e9, int(31.24 * 2**30)),
  "tpu7x": Chip(
    1153.5e12, 3690e9, 2.20e9, 300e9, 6.25e9, int(94.74 * 2**30), share=0.5
  ),
}

# Their names in jax's `device_kind`, as patterns of the whole of it.
GENERATIONS = {
  r"TPU v3": "v3",
  r"TPU v4": "v4",
  r"TPU v5( lite|e)": "v5e",
  r"TPU v5p?": "v5p",
  r"TPU v6( lite|e)": "v6e",
  r"TPU7x": "tpu7x",
}


def generation(device_kind: str) -> str:
  """Returns the key in `CHIPS`, or `device_kind` itself if it has none.

  Example:
    >>> generation("TPU v5 lite"), generation("cpu")
    ('v5e', 'cpu')
  """
  for pattern, name in GENERATIONS.items():
    if re.fullmatch(pattern, device_kind):
      return name
  return device_kind


# Dense bfloat16 peak of one jax device, FLOP/s, by a pattern of the whole of
# jax's `device_kind`: for a GPU that is the name given by its driver. NVIDIA
# prints most rates "with sparsity", twice the dense rate, which is used here. A
# device of TPU v2, v3 or TPU7x is a core, half a chip. Chips without bfloat16
# products (V100, T4), and parts of a GPU (MIG), have no entry.
PEAK_FLOPS = {
  r"TPU v2": 22.5e12,
  **{kind: CHIPS[name].peak_flops for kind, name in GENERATIONS.items()},
  r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB": 312e12,
  r"NVIDIA A100 80GB PCIe": 312e12,
  r"NVIDIA A30": 165e12,
  r"NVIDIA A10": 125e12,
  r"NVIDIA A10G": 70e12,
  r"NVIDIA L4": 121e12,
  r"NVIDIA L40": 181.05e12,
  r"NVIDIA L40S": 362.05e12,
  r"NVIDIA H100 80GB HBM3": 989.5e12,
  r"NVIDIA H100 PCIe": 756.5e12,
  r"NVIDIA H100 NVL": 835.5e12,
  r"NVIDIA H200": 989.5e12,
  r"NVIDIA H200 NVL": 835.5e12,
  r"NVIDIA GH200 \d+GB?( HBM3e)?": 989.5e12,
  r"NVIDIA B[23]00": 2250e12,
  r"NVIDIA GB[23]00": 2500e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Returns the bfloat16 FLOP/s of a device; None if unknown."""
  for pattern, rate in PEAK_FLOPS.items():
    if re.fullmatch(pattern, device_kind):
      return rate
  return None


def unknown_peak(device_kind: str) -> str:
  """Returns why MFU cannot be computed; "" for a CPU and for known devices."""
  if device_kind == "cpu" or peak_flops(device_kind):
    return ""
  return f"no bfloat16 rate of {device_kind!r} is known (vit_jax/devices.py)"


# Options of the TPU's compiler by `generation`; the others have its defaults.
# The limit of KiB is the fast memory that an operation may use: on v5p, where
# XLA does not prefetch, most of it. The other is how many results at a time may
# go to the fast memory and be copied out from there: with more, the copies cost
# more than they save.
OPTIONS = {
  "v4": {
    "xla_tpu_scoped_vmem_limit_kib": "24576",
    "xla_msa_max_outstanding_evictions": "1",
  },
  "v5e": {
    "xla_tpu_scoped_vmem_limit_kib": "32768",
    "xla_msa_max_outstanding_evictions": "1",
  },
  "v5p": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
}
# Where an MLP's hidden layers of a microbatch have fewer numbers than this, the
# compiler's defaults are faster by estimate: the fast memory then holds what a
# block computes, and nothing needs to be copied out.
FEW_HIDDEN = {"v5e": 5_000_000}

# Chips on which, by estimate, the kernels of queries, keys and values are
# better split by heads than by rows: XLA need not copy what it gathers. On v5e
# the two estimates disagree (benchmarks/notes/performance_log.md).
SPLIT_BY_HEADS = ("v4", "v5p", "v6e", "tpu7x")

# Chips on which microbatches of few images are faster by estimate, since their
# fast memory then holds what a block computes: the most numbers that an MLP's
# hidden layers of a microbatch should have, one or a SwiGLU's two (16 images of
# L/16 at 224 px have that many). Below MIN_MICROBATCH images it costs more to
# add up the gradients.
MAX_HIDDEN = {"v5e": 13_200_000}
MIN_MICROBATCH = 16

# Chips on which a forward pass alone is faster for few images at a time: the
# most pixels that these should have. The activations of one block of B/16 for 4
# images at 224 px fit a CPU's cache, and memory that the C library reuses.
FORWARD_PIXELS = {"cpu": 250_000}


def compiler_options(
  device_kind: str, hidden: int | None = None
) -> dict[str, str]:
  """Returns the compiler options of `jax.jit` for such devices.

  Args:
    device_kind: jax's name of the device.
    hidden: Activations of a microbatch in one MLP's hidden layers; None if
      unknown.
  """
  kind = generation(device_kind)
  if hidden is not None and hidden < FEW_HIDDEN.get(kind, 0):
    return {}
  return OPTIONS.get(kind, {})
