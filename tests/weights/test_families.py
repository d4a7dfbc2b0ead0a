"""Models of today: every block's output is the library's, in and out."""

import pytest

pytestmark = pytest.mark.slow

# A case takes a second or two, mostly to compile. All sums are float32 in other
# orders: the largest error seen is 1e-6 of the largest value.
TOLERANCE = 1e-5


def _cases():
  import weights_table

  return weights_table


@pytest.mark.parametrize(
  "library", ["timm", "transformers", "Meta", "OpenCLIP", "big_vision"]
)
def test_outputs_are_the_library_s(tmp_path, library):
  table = _cases()
  cases = [case for case in table.cases() if case.library == library]
  assert cases
  for i, case in enumerate(cases):
    folder = tmp_path / str(i)
    folder.mkdir()
    errors = table.compare(case, folder)
    assert max(errors.values()) < TOLERANCE, (case.name, errors)
