"""Models by name."""

import doctest

import pytest

from vit_jax.config import model_from_dict
from vit_jax.models import attention, posemb


def test_an_unknown_model_lists_the_nearest():
  with pytest.raises(
    ValueError, match="model.name: got 'vti', expected .* Did you mean 'vit'"
  ):
    model_from_dict({"name": "vti"})


@pytest.mark.parametrize("module", [attention, posemb])
def test_examples_in_docstrings(module):
  failed, attempted = doctest.testmod(module)
  assert attempted and not failed
