"""A tracker in memory, for the tests of trackers."""

from vit_jax.config import Config

CONFIG = Config(trackers=("wandb",))


class Recorder:
  """Keeps what it is told."""

  PACKAGE = "json"
  made: list = []

  def __init__(self, about):
    self.about, self.rows, self.state = about, [], None
    self.id = about.id or f"id{len(self.made)}"
    self.where = "in memory"
    self.made.append(self)

  @staticmethod
  def faults():
    return None

  def log(self, row):
    self.rows.append(dict(row))

  def finish(self, state):
    self.state = state


def without_time(rows):
  return [{k: v for k, v in r.items() if k != "time"} for r in rows]
