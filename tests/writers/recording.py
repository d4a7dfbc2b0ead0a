"""A tracker in memory, for the tests of trackers."""

from vit_jax.config import Config

CONFIG = Config(trackers=("wandb",))


class Recorder:
  """Keeps what it gets."""

  PACKAGE = "json"
  made: list = []

  def __init__(self, workdir, name, id):
    self.name, self.given_id = name, id
    self.rows, self.hparams, self.state = [], None, None
    self.id = id or f"id{len(self.made)}"
    self.where = "in memory"
    self.made.append(self)

  @staticmethod
  def error():
    return None

  def write_hparams(self, hparams):
    self.hparams = hparams

  def write_scalars(self, step, scalars):
    self.rows.append({"step": step, **scalars})

  def close(self, state="finished"):
    self.state = state


def without_time(rows):
  return [{k: v for k, v in r.items() if k != "time"} for r in rows]
