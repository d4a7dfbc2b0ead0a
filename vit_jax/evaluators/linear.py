"""Linear probe: heads trained by gradient on frozen features.

The features of both splits are computed once, without augmentation. A part of
the training split is held out; on the rest, the heads of a whole grid of
learning rates and weight decays are trained at once, on the same batches. The
head that is best on the held-out part is scored on the test split, once.

  x = (feature - mean) / (std + 1e-5), logits = x W + b
  loss = cross-entropy + weight_decay / 2 |W|^2

Heads begin at zero; the optimizer is gradient descent with a momentum of 0.9,
and the learning rate falls to zero along a cosine.

Source: DINOv2's protocol (arXiv:2304.07193, appendix B.3; facebookresearch/
dinov2, eval/linear.py: 12,500 steps of 1,024 images, this optimizer and
schedule, the grid's best on the validation split). Other than there, images are
not augmented, features are whitened, which makes one grid suit all models, and
the head is chosen on held-out training images.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.evaluators.evaluator import Answers, Context, Evaluator
from vit_jax.evaluators.features import Features, FeaturesConfig, Rows
from vit_jax.options import option

MOMENTUM = 0.9
STD_FLOOR = 1e-5
FETCHED = 2**24  # numbers of features sent to the device at a time
ROWS = 4096  # images scored at a time, which bounds the memory


@dataclasses.dataclass(frozen=True)
class LinearConfig(FeaturesConfig):
  """Linear heads trained by gradient on frozen features, the best of a grid."""

  name: str = "linear"
  kind: str = "linear"
  lrs: tuple[float, ...] = option(
    (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "peak learning rates of the grid"
  )
  weight_decays: tuple[float, ...] = option(
    (0.0, 0.001),
    "weights of half the squared norm of the kernel, each with each rate",
  )
  steps: int = option(12_500, "steps that train a head")
  step_images: int = option(1024, "images per step, at most those there are")
  held_out: float = option(
    0.1, "share of train_split that no head learns from, and that chooses one"
  )
  seed: int = option(0, "root of what is held out, and of the order of images")

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if not self.lrs or min(self.lrs) <= 0:
      yield f"{where}.lrs: got {self.lrs}, expected numbers above 0 as 0.1,1."
    if not self.weight_decays or min(self.weight_decays) < 0:
      yield (
        f"{where}.weight_decays: got {self.weight_decays}, expected numbers"
        " such as 0,0.001."
      )
    for key in ("steps", "step_images"):
      if getattr(self, key) < 1:
        yield f"{where}.{key}: got {getattr(self, key)}, expected 1 or more."
    if not 0 < self.held_out < 1:
      yield (
        f"{where}.held_out: got {self.held_out}, expected a share above 0 and"
        " below 1: the grid needs images to choose by."
      )
    if self.seed < 0:
      yield f"{where}.seed: got {self.seed}, expected 0 or more."

  def check(
    self, where: str, sources: Mapping[str, Any], head: Any, out: Any
  ) -> Iterator[str]:
    """Yields also a fault where nothing is left to learn or to choose from."""
    yield from super().check(where, sources, head, out)
    num = sources["train_split"].num_examples
    if not 0 < num_held_out(num, self.held_out) < num:
      yield (
        f"{where}.held_out: got {self.held_out} of {num} images, which leaves"
        " none to learn from or none to choose by; take a larger train_split."
      )

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return LinearProbe(context)


class Heads(NamedTuple):
  """Heads of a grid, and how features are whitened for them."""

  mean: np.ndarray  # float32 [d]
  std: np.ndarray  # float32 [d]
  kernels: np.ndarray  # float32 [grid, d, classes]
  biases: np.ndarray  # float32 [grid, classes]

  def answers(self, rows: Rows, which: int) -> tuple[np.ndarray, ...]:
    """Returns what a head predicts, its probability, and the label's, [n]."""
    parts = []
    for start in range(0, len(rows["x"]), ROWS):
      part = slice(start, start + ROWS)
      x = (rows["x"][part] - self.mean) / self.std
      logits = x @ self.kernels[which] + self.biases[which]
      chances = np.exp(logits - logits.max(axis=1, keepdims=True))
      chances /= chances.sum(axis=1, keepdims=True)
      at = np.arange(len(chances))
      best = chances.argmax(axis=1)
      parts.append((best, chances[at, best], chances[at, rows["label"][part]]))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))

  def accuracies(self, rows: Rows, which: slice = slice(None)) -> np.ndarray:
    """Returns the share of the rows that each head predicts right, [grid].

    NaN of a head that has diverged: one of its logits is not finite.
    """
    kernels, biases = self.kernels[which], self.biases[which]
    num_right = np.zeros(len(kernels))
    for start in range(0, len(rows["x"]), ROWS):
      part = slice(start, start + ROWS)
      x = (rows["x"][part] - self.mean) / self.std
      for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        logits = x @ kernel + bias
        is_right = logits.argmax(axis=1) == rows["label"][part]
        num_right[i] += is_right.sum() if np.isfinite(logits).all() else np.nan
    return num_right / len(rows["x"])


class LinearProbe(Features):
  """Scores features by the best of a grid of linear heads."""

  def gather(self, params: Any) -> tuple[Heads, Rows, Rows]:
    """Returns the heads, the rows that choose one, and those to score.

    Each process trains the same heads, on one of its devices.
    """
    train, test = self.splits(params)
    options = self.config
    learned, held_out = divided(train, options.held_out, options.seed)
    heads = train_heads(
      learned["x"],
      learned["label"],
      self.num_classes,
      grid(options),
      steps=self._steps,
      step_images=options.step_images,
      seed=options.seed,
    )
    return heads, held_out, test

  def score(self, gathered: tuple[Heads, Rows, Rows]) -> dict[str, float]:
    """Returns `<name>/top1`, of the chosen head on the test split.

    Beside it `<name>/held_out`, its share right on the images that chose it;
    its `lr` and `weight_decay`; and `count`, the number of test images. All but
    the last are NaN where all heads have diverged.
    """
    heads, held_out, test = gathered
    of_each = heads.accuracies(held_out)
    # Among equal ones the first of the grid, and none that has diverged.
    best = int(np.nan_to_num(of_each, nan=-1.0).argmax())
    (top1,) = heads.accuracies(test, slice(best, best + 1))
    lr, weight_decay = grid(self.config)[best]
    if np.isnan(of_each[best]):  # there is no other
      lr = weight_decay = np.nan
    self.answers = None
    if np.isfinite(top1):
      self.answers = Answers(
        f"the head with learning rate {lr:g}, weight decay {weight_decay:g}",
        "probability",
        test["index"],
        test["label"],
        *heads.answers(test, best),
      )
    scores = {
      "top1": top1,
      "held_out": of_each[best],
      "lr": lr,
      "weight_decay": weight_decay,
      "count": len(test["label"]),
    }
    return {f"{self.config.name}/{k}": float(v) for k, v in scores.items()}

  @property
  def _steps(self) -> int:
    return 2 if self.context.config.fake_data else self.config.steps

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """See `Evaluator`."""
    import jax

    options, train = self.config, self._train
    num = train.num_examples - num_held_out(
      train.num_examples, options.held_out
    )
    heads, rows = grid(options), min(options.step_images, num)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    head = (
      of(len(heads), width, self.num_classes),
      of(len(heads), self.num_classes),
    )
    found = {}
    for steps in {n for _, n in chunks(self._steps, rows, width)}:
      batches = (
        of(steps, rows, width),
        jax.ShapeDtypeStruct((steps, rows), np.int32),
        of(steps),
      )
      found[f"heads of {steps} steps"] = (
        training(tuple(heads), self._steps),
        ((head, head), batches, of(width), of(width)),
      )
    return found


def grid(options: LinearConfig) -> list[tuple[float, float]]:
  """Returns the pairs (learning rate, weight decay) of the grid."""
  return list(itertools.product(options.lrs, options.weight_decays))


def num_held_out(num: int, share: float) -> int:
  """Returns how many of `num` images are held out."""
  return round(num * share)


def divided(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
  """Returns the rows to learn from, and the share that is held out.

  Which are held out is a function of their number, share and seed.
  """
  num = len(rows["label"])
  order = np.random.default_rng(seed).permutation(num)
  held_out = order[: num_held_out(num, share)]
  is_held_out = np.isin(np.arange(num), held_out)
  return tuple(
    {k: v[chosen] for k, v in rows.items()}
    for chosen in (~is_held_out, is_held_out)
  )


def train_heads(
  x: np.ndarray,
  labels: np.ndarray,
  num_classes: int,
  grid: list[tuple[float, float]],
  *,
  steps: int,
  step_images: int,
  seed: int,
) -> Heads:
  """Trains a linear head for every pair of the grid, at once, on one device.

  An epoch is one permutation of the images; a batch is the next `step_images`
  of the epochs in a row. All heads see the same batches.

  Args:
    x: Features, float [n, d].
    labels: Their classes, int [n].
    num_classes: Number of classes.
    grid: (learning rate, weight decay) of each head.
    steps: Steps.
    step_images: Images per step; at most n are taken.
    seed: Root of the permutations.
  """
  import jax

  mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
  std = x.std(axis=0, dtype=np.float64).astype(np.float32) + STD_FLOOR
  rows, trained = min(step_images, len(x)), training(tuple(grid), steps)
  with jax.default_device(jax.local_devices()[0]):
    heads = (
      np.zeros((len(grid), x.shape[1], num_classes), np.float32),
      np.zeros((len(grid), num_classes), np.float32),
    )
    state, order = jax.device_put((heads, heads)), _order(len(x), seed)
    for start, count in chunks(steps, rows, x.shape[1]):
      numbers = np.arange(start, start + count)
      at = np.stack([order(i * rows, rows) for i in numbers.tolist()])
      batches = (
        x[at].astype(np.float32),
        labels[at].astype(np.int32),
        numbers.astype(np.float32),
      )
      before, state = state, trained(state, batches, mean, std)
      jax.block_until_ready(before)  # else all batches wait on the device
  return Heads(mean, std, *jax.device_get(state[0]))


def chunks(steps: int, rows: int, width: int) -> Iterator[tuple[int, int]]:
  """Yields (first step, number of steps) of what the device gets at a time.

  Args:
    steps: All steps.
    rows: Images per step.
    width: Numbers of a feature.

  Example:
    >>> list(chunks(steps=40, rows=1024, width=1024))
    [(0, 16), (16, 16), (32, 8)]
  """
  chunk = max(1, min(steps, FETCHED // (rows * width)))
  for start in range(0, steps, chunk):
    yield start, min(chunk, steps - start)


@functools.cache
def training(grid: tuple[tuple[float, float], ...], steps: int) -> Callable:
  """Returns fn(state, batches, mean, std) -> state, jitted: some of the steps.

  Args:
    grid: (learning rate, weight decay) of each head.
    steps: All steps, over which the learning rates fall.

  The state is (heads, velocity), each kernels float32 [grid, d, classes] and
  biases float32 [grid, classes]. Batches have the features float32 [n, rows,
  d], labels int32 [n, rows] and numbers float32 [n] of n steps; mean and std
  are float32 [d].
  """
  import jax
  import jax.numpy as jnp

  rates, decays = np.array(grid, np.float32).T

  def loss_of(head, x, labels, decay):
    kernel, bias = head
    logits = jnp.matmul(x, kernel, precision="highest") + bias[None]
    at = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - at
    return losses.mean() + decay / 2 * jnp.sum(kernel**2)

  def update(head, velocity, x, labels, rate, decay):
    grads = jax.grad(loss_of)(head, x, labels, decay)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    head = jax.tree.map(lambda w, v: w - rate * v, head, velocity)
    return head, velocity

  updates = jax.vmap(update, in_axes=(0, 0, None, None, 0, 0))

  @jax.jit
  def trained(state, batches, mean, std):
    def step(state, batch):
      x, labels, number = batch
      fall = (1 + jnp.cos(jnp.pi * number / steps)) / 2
      x = (x - mean[None]) / std[None]
      return updates(*state, x, labels, rates * fall, decays), None

    return jax.lax.scan(step, state, batches)[0]

  return trained


def _order(num: int, seed: int):
  """Returns (start, count) -> the records at these places of the epochs."""
  known: dict[int, np.ndarray] = {}

  def permutation(epoch: int) -> np.ndarray:
    if epoch not in known:
      known.clear()
      known[epoch] = np.random.default_rng((seed, epoch)).permutation(num)
    return known[epoch]

  def at(start: int, count: int) -> np.ndarray:
    found = []
    while count:
      epoch, place = divmod(start, num)
      part = permutation(epoch)[place : place + count]
      found.append(part)
      start, count = start + len(part), count - len(part)
    return np.concatenate(found)

  return at
