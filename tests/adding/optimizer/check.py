"""Trains two steps with the new optimizer, the state split over devices."""

import os
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from vit_jax.config import defaults, freeze
from vit_jax.train import train_and_evaluate

c = defaults()
c.model.variant, c.model.depth = "Ti/16", 1
c.data.dataset, c.fake_data = "cifar10", True
c.data.ops, c.data.batch_size = "decode|resize(32)", 16
c.mesh.fsdp = 4
c.total_steps = 1
c.optim.name, c.optim.lr = "lion", 1e-3
with tempfile.TemporaryDirectory() as folder:
  state = train_and_evaluate(freeze(c), folder)
# The first update of Lion is the sign of the gradient times the learning rate;
# a head that begins with zeros shows it.
head = np.asarray(state.params["head"]["kernel"])
np.testing.assert_allclose(np.abs(head), 1e-3, rtol=1e-6)
