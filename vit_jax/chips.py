"""What a TPU chip can do: the makers' data sheets.

Source: cloud.google.com/tpu/docs, one page a generation. A device of jax is a
chip (v4 and v5p in megacore).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip.

  Attributes:
    peak_flops: Dense bfloat16, FLOP/s.
    hbm_bandwidth: Bytes/s.
    clock: Of the matrix unit, Hz.
    ici_bandwidth: All links between chips, one way, bytes/s.
    capacity: Of the memory, bytes: what libtpu 0.0.50 leaves to a program.
  """

  peak_flops: float
  hbm_bandwidth: float
  clock: float
  ici_bandwidth: float
  capacity: int


CHIPS = {
  "v4": Chip(275e12, 1228e9, 1.05e9, 300e9, int(30.75 * 2**30)),
  "v5e": Chip(197e12, 819e9, 1.50e9, 200e9, int(15.75 * 2**30)),
  "v5p": Chip(459e12, 2765e9, 1.75e9, 600e9, int(95.73 * 2**30)),
  "v6e": Chip(918e12, 1640e9, 1.75e9, 448e9, int(31.24 * 2**30)),
}
