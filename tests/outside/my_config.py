"""A run of seconds whose family, objective and evaluator are of one's own."""

from vit_jax.config import defaults


def get_config():
  c = defaults()
  c.model.name = "my_lab.family:Bags"
  c.model.width = 8
  c.objective.kind = "my_lab.objective:Focused"
  c.objective.focus = 0.25
  c.data.dataset, c.fake_data = "cifar10", True
  c.data.ops = "decode|resize(32)"
  c.data.batch_size = 16
  c.total_steps, c.log_steps, c.checkpoint.every_steps = 2, 1, 2
  c.evals = {
    "own": {
      "kind": "my_lab.evaluator:Scores",
      "split": "test",
      "ops": "decode|resize(32)",
      "batch_size": 16,
      "power": 3,
    }
  }
  return c
