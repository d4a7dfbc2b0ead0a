"""Models of other libraries, in and out: one row is one model.

A row saves a small model of the library, loads it here, compares the output of
every block and the last output at the trained size and at another one, writes
it in the library's format, reads that back bit by bit, and compares what the
library makes of it. `make weights-table` prints the same rows.
"""

import pytest
import weights_table

# All sums are float32 in other orders: the largest error seen is 1e-6 of the
# largest value.
TOLERANCE = 1e-5
# Of ResNets with random weights 4e-5, and less than 5e-6 in float64: see
# test_timm_names.py.
OF_RESNETS = 1e-4
# The library of the row that `.ci/run` has of each family. The other rows take
# the same path with other names.
SLOW = {
  "ViT": ("transformers",),
  "hybrids, BiT": ("timm",),
  "DeiT III": ("Meta",),
  "DINOv2": ("Meta",),
  "DINOv2 with registers": ("transformers",),
  "DINOv3": ("Meta",),
  "SigLIP, SigLIP 2": ("timm",),
  "CLIP, OpenCLIP": ("OpenCLIP",),
  "MAE": ("transformers",),
  "BEiT, BEiT v2": ("transformers",),
  "EVA-02": ("timm",),
  "LoRA": ("peft",),
}


def _rows():
  """Returns all rows; the first one of a family's libraries is slow."""
  seen, rows = set(), []
  for case in weights_table.cases():
    key = case.family, case.library
    is_slow = case.library in SLOW.get(case.family, ()) and key not in seen
    seen.add(key)
    mark = pytest.mark.slow if is_slow else pytest.mark.nightly
    rows.append(
      pytest.param(case, id=f"{case.library}-{case.name}", marks=mark)
    )
  return rows


@pytest.mark.parametrize("case", _rows())
def test_in_outputs_and_out(tmp_path, case):
  sizes = dict.fromkeys((case.sizes[0], case.sizes[-1]))
  errors = weights_table.compare(case._replace(sizes=tuple(sizes)), tmp_path)
  tolerance = OF_RESNETS if "BiT" in case.family else TOLERANCE
  assert max(errors.values()) < tolerance, errors
