import pytest

from vit_jax.tools.reporting import charts


@pytest.fixture
def undrawn(monkeypatch):
  """Figures are made, and not drawn, which takes most of a page's time."""
  monkeypatch.setattr(charts, "render", lambda draw: draw() and "<svg></svg>")
