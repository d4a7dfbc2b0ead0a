"""The list of changes that `make mutants` tries; no test runs here."""

import mutants


def test_each_text_is_once_in_its_file():
  assert not mutants.errors()
  changes = [*mutants.mutants()]
  assert len({*changes}) == len(changes) >= 60
