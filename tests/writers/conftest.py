"""Fixtures for the tests of a run."""

import pytest
from recording import Recorder

from vit_jax.writers import trackers


@pytest.fixture
def recorder(monkeypatch):
  """A tracker in memory in the place of wandb: a class, `made` its objects."""
  kind = type("Kind", (Recorder,), {"made": []})
  monkeypatch.setitem(trackers.TRACKERS, "wandb", kind)
  return kind
