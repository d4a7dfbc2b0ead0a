"""Models of today: every block's output is the library's, in and out.

At the trained size, and at the last other one; `make weights-table` has all.
"""

import pytest

pytestmark = pytest.mark.nightly

# All sums are float32 in other orders: the largest error seen is 1e-6 of the
# largest value.
TOLERANCE = 1e-5
# Parts of all cases, so that several processes share them. The libraries take
# seconds to import, so the cases themselves are not known to pytest.
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_outputs_are_the_library_s(tmp_path, part):
  import weights_table

  cases = weights_table.cases()[part::PARTS]
  assert cases
  for i, case in enumerate(cases):
    folder = tmp_path / str(i)
    folder.mkdir()
    sizes = dict.fromkeys((case.sizes[0], case.sizes[-1]))
    errors = weights_table.compare(case._replace(sizes=tuple(sizes)), folder)
    assert max(errors.values()) < TOLERANCE, (case.name, errors)
