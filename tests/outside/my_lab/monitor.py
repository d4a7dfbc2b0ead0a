from vit_jax.callbacks import Callback


class Scaled(Callback):
  """Logs the loss times a factor."""

  def __init__(self, factor=1.0):
    self.factor = factor

  def on_log(self, step, values):
    return {**values, "scaled": values["loss"] * self.factor}
