"""Compares training steps on a CPU: `python benchmarks/cpu_step.py`.

Three programs do the same work, each in its own process, in turns: `vit_jax`
(`vit_jax.step`, as in the commands); flax's nn.MultiHeadDotProductAttention,
nn.Conv and nn.LayerNorm with optax; and timm (eager), if torch and timm are
installed. Images are random and have 224 pixels a side; batches of 8, float32,
clipped gradients, Adam with decoupled decay. The table has medians over the
turns: seconds on the clock, seconds of processor time (which other programs
disturb less), and the ratios of both to `vit_jax` in the same turn.

python benchmarks/cpu_step.py S/16 [TURNS]
taskset -c 0 python benchmarks/cpu_step.py Ti/16
"""

import contextlib
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import turns
from timm_speed import CLIP, DECAY, LR, NUM_CLASSES, our_config, timm_step

from vit_jax import malloc, sharding
from vit_jax import step as step_lib

PIXELS, BATCH = 224, 8


class PlainBlock(nn.Module):
  """A block of the encoder, made of flax's own parts."""

  mlp_dim: int
  num_heads: int

  @nn.compact
  def __call__(self, x):
    y = nn.LayerNorm(1e-6)(x)
    x = x + nn.MultiHeadDotProductAttention(self.num_heads)(y, y)
    y = nn.LayerNorm(1e-6)(x)
    y = nn.gelu(nn.Dense(self.mlp_dim)(y))
    return x + nn.Dense(x.shape[-1])(y)


class PlainViT(nn.Module):
  """The Transformer of ViT, made of flax's own parts."""

  patch: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int

  @nn.compact
  def __call__(self, images):
    side = (self.patch, self.patch)
    x = nn.Conv(self.width, side, side, "VALID", name="embedding")(images)
    x = x.reshape(x.shape[0], -1, self.width)
    cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
    x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], 1)
    x += self.param("pos", nn.initializers.normal(0.02), (1, *x.shape[1:]))
    for _ in range(self.depth):
      x = PlainBlock(self.mlp_dim, self.num_heads)(x)
    x = nn.LayerNorm(1e-6)(x)[:, 0]
    return nn.Dense(NUM_CLASSES, kernel_init=nn.initializers.zeros)(x)


def batch() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    "image": rng.integers(0, 256, (BATCH, PIXELS, PIXELS, 3), np.uint8),
    "label": rng.integers(0, NUM_CLASSES, BATCH, np.int32),
    "mask": np.ones(BATCH, bool),
    "index": np.arange(BATCH),
  }


def our_step(variant: str) -> Callable[[], None]:
  """Returns a function that trains by one step, and waits for it."""
  malloc.reuse_freed_memory()
  config = our_config(variant, PIXELS, BATCH, "float32")
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  run_shape = step_lib.RunShape(
    NUM_CLASSES, (PIXELS, PIXELS), config.total_steps
  )
  trainer = step_lib.assemble(config, run_shape, mesh)
  state, rows = trainer.init_state(), sharding.to_global(batch(), mesh)
  return _repeated(trainer.train_step, state, rows)


def plain_step(variant: str) -> Callable[[], None]:
  """Does what `our_step` does, with flax's and optax's parts."""
  model = our_config(variant, PIXELS, BATCH, "float32").model
  sizes, patch = model.size, model.patch
  model = PlainViT(
    patch, sizes.width, sizes.depth, sizes.mlp_dim, sizes.num_heads
  )
  tx = optax.chain(
    optax.clip_by_global_norm(CLIP), optax.adamw(LR, weight_decay=DECAY)
  )

  def train_step(state, batch):
    params, opt_state = state

    def loss_fn(params):
      images = batch["image"].astype(jnp.float32) / 127.5 - 1.0
      logits = model.apply({"params": params}, images)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
      ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

  images = jnp.zeros((1, PIXELS, PIXELS, 3))
  params = jax.jit(model.init)(jax.random.key(0), images)["params"]
  state = (params, jax.jit(tx.init)(params))
  return _repeated(jax.jit(train_step, donate_argnums=0), state, batch())


def _repeated(train_step, state, batch) -> Callable[[], None]:
  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    jax.block_until_ready((state, metrics))

  return step


def timms_step(variant: str) -> Callable[[], None]:
  """Does what `our_step` does, with timm."""
  step = timm_step(variant, PIXELS, BATCH, "cpu")
  return lambda: step().item()


STEPS = {"ours": our_step, "plain": plain_step, "timm": timms_step}


def serve(step: Callable[[], None]) -> None:
  """Does a step for every line that comes in, and prints its times."""
  step()
  step()
  for _ in sys.stdin:
    start, start_busy = time.perf_counter(), time.process_time()
    step()
    seconds = time.perf_counter() - start
    print(seconds, time.process_time() - start_busy, flush=True)


def measure(variant: str, names: list[str], count: int) -> dict:
  """Times `count` steps of each: name -> [(seconds, busy seconds), ...]."""
  times_by_name = {name: [] for name in names}
  with contextlib.ExitStack() as at_exit:
    servers = {}
    for name in names:
      command = [sys.executable, __file__, variant, "serve", name]
      servers[name] = server = at_exit.enter_context(turns.start(command))
      turns.ask(server)  # so that none compiles while another is timed
    for _ in range(count):
      for name, server in servers.items():
        times_by_name[name].append(turns.ask(server))
  return times_by_name


def table(times_by_name: dict) -> str:
  """Returns medians, and ratios to the first."""
  lines = [f"{'':8}{'seconds':>9}{'ratio':>7}{'busy':>9}{'ratio':>7}"]
  first = next(iter(times_by_name.values()))
  for name, times in times_by_name.items():
    line = f"{name:8}"
    for kind in (0, 1):
      seconds = [t[kind] for t in times]
      pairs = zip(seconds, first, strict=True)
      ratio = statistics.median(a / b[kind] for a, b in pairs)
      line += f"{statistics.median(seconds):9.3f}{ratio:7.2f}"
    lines.append(line)
  return "\n".join(lines)


def main() -> None:
  argv = sys.argv[1:] or ["Ti/16"]
  variant = argv[0]
  if argv[1:2] == ["serve"]:
    return serve(STEPS[argv[2]](variant))
  count = int(argv[1]) if argv[1:] else 11
  has_torch = all(importlib.util.find_spec(name) for name in ("torch", "timm"))
  names = [name for name in STEPS if name != "timm" or has_torch]
  print(
    f"{variant}, {PIXELS} px, batch {BATCH}, jax {jax.__version__},"
    f" {len(os.sched_getaffinity(0))} core(s), load {os.getloadavg()[0]:.1f},"
    f" XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}"
  )
  print(table(measure(variant, names, count)), flush=True)


if __name__ == "__main__":
  main()
