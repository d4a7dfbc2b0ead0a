"""What a TPU can do: the makers' data sheets; and what its compiler is told.

Source: cloud.google.com/tpu/docs, one page a generation; for the links of v3,
the bandwidth of all-reduces over a pod. Options: docs/performance.md.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
  """What jax calls a device: a chip (v4 and v5p in megacore), half a v3.

  Attributes:
    peak_flops: Dense bfloat16, FLOP/s.
    hbm_bandwidth: Bytes/s.
    clock: Of the matrix unit, Hz.
    ici_bandwidth: All links between chips, one way, bytes/s.
    capacity: Of the memory, bytes: what libtpu 0.0.50 leaves to a program.
    share: Of a chip.
  """

  peak_flops: float
  hbm_bandwidth: float
  clock: float
  ici_bandwidth: float
  capacity: int
  share: float = 1.0


CHIPS = {
  "v3": Chip(61.5e12, 450e9, 0.94e9, 164e9, int(15.48 * 2**30), share=0.5),
  "v4": Chip(275e12, 1228e9, 1.05e9, 300e9, int(30.75 * 2**30)),
  "v5e": Chip(197e12, 819e9, 1.50e9, 200e9, int(15.75 * 2**30)),
  "v5p": Chip(459e12, 2765e9, 1.75e9, 600e9, int(95.73 * 2**30)),
  "v6e": Chip(918e12, 1640e9, 1.75e9, 448e9, int(31.24 * 2**30)),
}

# KiB of the fast memory that one operation may use for itself, by jax's name of
# the kind (here v5p). The rest holds what is fetched ahead, which XLA does not
# do there. Other kinds: as the compiler has it.
SCOPED_MEMORY = {"TPU v5": 49_152}


def compiler_options(device_kind: str) -> dict[str, str]:
  """Returns what `jax.jit` tells the compiler for such devices."""
  if device_kind not in SCOPED_MEMORY:
    return {}
  size = SCOPED_MEMORY[device_kind]
  return {"xla_tpu_scoped_vmem_limit_kib": str(size)}
