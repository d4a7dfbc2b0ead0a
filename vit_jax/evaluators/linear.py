"""Linear probe: heads trained by gradient descent on frozen features.

A tenth of the training split is held out. On the rest, one head is trained for
each layer, learning rate and weight decay, all at once on the same batches. The
head that is best on the held-out tenth is scored once on the test split. The
features of both splits are computed once, without augmentation; with
`train_ops`, training features are computed anew in each pass.

  x = (feature - mean) / (std + 1e-5), logits = x W + b
  loss = cross-entropy + weight_decay / 2 |W|^2

Heads start at zero. The optimizer is gradient descent with momentum 0.9; the
learning rate falls to zero along a cosine.

Source: DINOv2 (arXiv:2304.07193, appendix B.3; facebookresearch/dinov2,
eval/linear.py): 12,500 steps of 1,024 images, the optimizer and the schedule.
Three things differ. Features are whitened by default, so that one grid suits
all models. Images are not augmented by default. The head is chosen on held-out
training images, not on the validation split. configs/probes.py has the grids of
DINOv2 and DINOv3.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Answers,
  Context,
  Evaluator,
  Outputs,
  Params,
  Splits,
)
from vit_jax.evaluators.features import (
  TOKENS,
  Features,
  FeaturesConfig,
  Rows,
  extract,
  intermediate,
  num_blocks,
  parts,
)
from vit_jax.options import option, unexpected

HELD_OUT = 0.1  # share of train_split that is held out to choose a head
STEP_IMAGES = 1024  # images per step; fewer if there are not as many
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
    (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "peak learning rates of the grid; widen the grid if the first or the last"
    " is best",
  )
  weight_decays: tuple[float, ...] = option(
    (0.0, 0.001),
    "weight decays of the grid: factors of half the squared norm of the kernel",
  )
  layers: tuple[str, ...] = option(
    (),
    "layers to choose among, such as cls,cls*4+patches, each with every"
    " learning rate and weight decay; intermediates must have the same width;"
    " none: only `layer`",
  )
  whiten: bool = option(
    True, "whether features are scaled to mean 0 and standard deviation 1"
  )
  train_ops: str | None = option(
    None,
    "random preprocessing of the training images, drawn anew in each pass;"
    " None: `ops`, computed once",
  )
  steps: int = option(12_500, "training steps of the heads")
  seed: int = option(0, "seed of the held-out images and of the batches")

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    for name, is_right, expected in (
      ("lrs", min(self.lrs, default=0) > 0, "numbers above 0"),
      (
        "weight_decays",
        min(self.weight_decays, default=-1) >= 0,
        "numbers of 0 or more",
      ),
      (
        "whiten",
        not self.whiten or self.train_ops is None,
        "false beside train_ops, whose features are not known before the steps",
      ),
      ("steps", self.steps >= 1, "1 or more"),
      ("seed", self.seed >= 0, "0 or more"),
    ):
      if not is_right:
        yield unexpected(f"{where}.{name}", getattr(self, name), expected)

  @property
  def alternatives(self) -> tuple[str, ...]:
    """See `FeaturesConfig`."""
    return self.layers or (self.layer,)

  @property
  def layers_option(self) -> str:
    """See `FeaturesConfig`."""
    return "layers" if self.layers else "layer"

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields also an error for fewer than 10 images, or for unequal widths."""
    yield from super().check(where, sources, head, out)
    widths = {}
    for layer in self.layers:
      path = "encoded" if TOKENS.fullmatch(layer) else layer
      with contextlib.suppress(ValueError):  # `super` reports it
        widths[layer] = intermediate(out, path).shape[-1]
    if len(set(widths.values())) > 1:
      listed = ", ".join(f"{k} of {width}" for k, width in widths.items())
      yield (
        f"{where}.layers: got {listed} channels, expected layers of one width;"
        " use one evaluator for each width."
      )
    num = sources["train_split"].num_examples
    if num < 10:
      yield (
        f"{where}.train_split: got {num} images, of which a tenth is held out"
        " to choose the head; expected 10 or more."
      )

  def num_images(self, sources: Splits) -> tuple[int, ...]:
    """See `EvaluatorConfig`."""
    train, test = (sources[option].num_examples for option in self.SPLITS)
    if self.train_ops is not None:
      learned = min(STEP_IMAGES, train - num_held_out(train))
      train = num_held_out(train) + self.steps * learned
    return train, test

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return LinearProbe(context)


class Heads(NamedTuple):
  """Heads of a grid, and the whitening of their features.

  The kernel of a head is zero for the features of other layers.
  """

  mean: np.ndarray  # float32 [d]
  std: np.ndarray  # float32 [d]
  kernels: np.ndarray  # float32 [grid, d, classes]
  biases: np.ndarray  # float32 [grid, classes]

  def logits(
    self, rows: Rows, which: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields logits [n, classes] of a head and labels [n] of `ROWS` images."""
    for start in range(0, len(rows["x"]), ROWS):
      part = slice(start, start + ROWS)
      x = (rows["x"][part] - self.mean) / self.std
      yield x @ self.kernels[which] + self.biases[which], rows["label"][part]

  def accuracy(self, rows: Rows, which: int) -> float:
    """Returns the accuracy of a head; NaN if a logit is not finite."""
    num_right = 0.0
    for logits, labels in self.logits(rows, which):
      is_right = logits.argmax(axis=1) == labels
      num_right += is_right.sum() if np.isfinite(logits).all() else np.nan
    return num_right / len(rows["x"])

  def answers(self, rows: Rows, which: int) -> tuple[np.ndarray, ...]:
    """Returns prediction and its probability, and the label's, each [n]."""
    parts = []
    for logits, labels in self.logits(rows, which):
      p = np.exp(logits - logits.max(axis=1, keepdims=True))
      p /= p.sum(axis=1, keepdims=True)
      prediction, at = p.argmax(axis=1), np.arange(len(p))
      parts.append((prediction, p[at, prediction], p[at, labels]))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


class LinearProbe(Features):
  """Scores features by the best linear head of a grid."""

  def gather(self, params: Params) -> tuple[Heads, Rows, Rows]:
    """Returns the heads, the held-out rows and the rows to score.

    Each process trains the same heads, on one of its devices.
    """
    options, source = self.config, self._train
    if options.train_ops is None:
      train, test = self.splits(params)
      learned, held_out = divided(train, options.seed)
      heads = train_heads(
        learned["x"],
        learned["label"],
        self.num_classes,
        self._rates,
        steps=self._steps,
        seed=options.seed,
        layers=self._layers(learned["x"].shape[1]),
        whiten=options.whiten,
      )
      return heads, held_out, test
    is_chosen = ~is_held_out(source.num_examples, options.seed)
    held_out, test = (
      extract(self.context, split, self._features, params, records)
      for split, records in (
        (source, np.flatnonzero(~is_chosen)),
        (self._test, None),
      )
    )
    chosen = np.flatnonzero(is_chosen)
    rows = min(STEP_IMAGES, len(chosen))
    batches = self.context.augmented(
      source, chosen, options.train_ops, options.seed
    )
    needed = -(-self._steps * rows // options.batch_size)
    features = self.context.forward(
      self._features, params, itertools.islice(batches, needed)
    )
    width = test["x"].shape[1]
    heads = _fitted(
      steps_of(features, self._steps, rows, width),
      (np.zeros(width, np.float32), np.ones(width, np.float32)),
      self.num_classes,
      self._rates,
      self._steps,
      self._layers(width),
    )
    return heads, held_out, test

  def score(self, gathered: tuple[Heads, Rows, Rows]) -> dict[str, float]:
    """Returns `<name>/top1`, the accuracy of the chosen head on the test split.

    Other metrics are `held_out`, its accuracy on the held-out images; its `lr`
    and `weight_decay`; `layer`, its index in the option `layers`, if there are
    several; and `count`, the number of test images. If all heads diverged, all
    metrics except `layer` and `count` are NaN.
    """
    heads, held_out, test = gathered
    accuracies = [
      heads.accuracy(held_out, i) for i in range(len(heads.kernels))
    ]
    # The first of several best heads; a diverged head only if all diverged.
    best = int(np.nan_to_num(accuracies, nan=-1.0).argmax())
    top1 = heads.accuracy(test, best)
    layer, lr, weight_decay = grid(self.config)[best]
    layers = self.config.alternatives
    if np.isnan(accuracies[best]):
      lr = weight_decay = np.nan
    self.answers = None
    if np.isfinite(top1):
      of_layer = f" of {layers[layer]}" if len(layers) > 1 else ""
      self.answers = Answers(
        f"the head{of_layer} with learning rate {lr:g}, weight decay"
        f" {weight_decay:g}",
        "probability",
        test["index"],
        test["label"],
        *heads.answers(test, best),
      )
    scores = {
      "top1": top1,
      "held_out": accuracies[best],
      "lr": lr,
      "weight_decay": weight_decay,
      "count": len(test["label"]),
    }
    if len(layers) > 1:
      scores["layer"] = layer
    return {f"{self.config.name}/{k}": float(v) for k, v in scores.items()}

  @property
  def _rates(self) -> list[tuple[float, float]]:
    return [(lr, decay) for _, lr, decay in grid(self.config)]

  def _layers(self, width: int) -> np.ndarray:
    """Returns 1 if a head reads a feature, else 0, float32 [grid, width].

    The features are the parts of all layers, which have the same width.
    """
    layers = self.config.alternatives
    if len(layers) == 1:
      return np.ones((len(self._rates), width), np.float32)
    depth = num_blocks(self.context.config.model)
    parts_of = [parts(layer, depth) for layer in layers]
    every = dict.fromkeys(itertools.chain(*parts_of))
    reads = [[part in some for part in every] for some in parts_of]
    reads = np.repeat(np.array(reads, np.float32), width // len(every), axis=1)
    return reads[[layer for layer, _, _ in grid(self.config)]]

  @property
  def _steps(self) -> int:
    return 2 if self.context.config.fake_data else self.config.steps

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """See `Evaluator`."""
    import jax

    pairs, num = self._rates, self._train.num_examples
    rows = min(STEP_IMAGES, num - num_held_out(num))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    state = _state(len(pairs), width, self.num_classes)
    programs = {}
    for steps in {*chunks(self._steps, rows, width)}:
      batches = (
        array(steps, rows, width),
        jax.ShapeDtypeStruct((steps, rows), np.int32),
      )
      features = array(width), array(width), array(len(pairs), width)
      programs[f"heads of {steps} steps"] = (
        training(tuple(pairs), self._steps),
        (state, batches, *features),
      )
    return programs


def grid(options: LinearConfig) -> list[tuple[int, float, float]]:
  """Returns the grid: (index of the layer, learning rate, weight decay)."""
  layers = range(len(options.alternatives))
  return list(itertools.product(layers, options.lrs, options.weight_decays))


def num_held_out(num: int) -> int:
  """Returns the number of held-out images among `num`."""
  return max(1, round(num * HELD_OUT))


def is_held_out(num: int, seed: int) -> np.ndarray:
  """Returns True for the held-out rows, bool [num], depending on the seed."""
  order = np.random.default_rng(seed).permutation(num)
  return np.isin(np.arange(num), order[: num_held_out(num)])


def divided(rows: Rows, seed: int) -> tuple[Rows, Rows]:
  """Returns the rows to learn from, and the held-out rows."""
  is_out = is_held_out(len(rows["label"]), seed)
  return tuple(
    {k: v[chosen] for k, v in rows.items()} for chosen in (~is_out, is_out)
  )


def train_heads(
  x: np.ndarray,
  labels: np.ndarray,
  num_classes: int,
  grid: list[tuple[float, float]],
  *,
  steps: int,
  seed: int,
  step_images: int = STEP_IMAGES,
  layers: np.ndarray | None = None,
  whiten: bool = True,
) -> Heads:
  """Trains a linear head for every pair of the grid, at once, on one device.

  An epoch is a permutation of the images; a batch may cross the end of an
  epoch. All heads see the same batches.

  Args:
    x: Features, float [n, d].
    labels: Classes of the images, int [n].
    num_classes: Number of classes.
    grid: (learning rate, weight decay) of each head.
    steps: Number of steps.
    seed: Seed of the permutations.
    step_images: Images per step; at most n are used.
    layers: 1 if a head reads a feature, else 0, [grid, d]; None: all heads read
      all features.
    whiten: Whether features are whitened.
  """
  width = x.shape[1]
  mean, std = np.zeros(width, np.float32), np.ones(width, np.float32)
  if whiten:
    mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = x.std(axis=0, dtype=np.float64).astype(np.float32) + STD_FLOOR
  if layers is None:
    layers = np.ones((len(grid), width), np.float32)
  rows, order = min(step_images, len(x)), order_of(len(x), seed)

  def batches():
    for count in chunks(steps, rows, width):
      at = np.fromiter(itertools.islice(order, count * rows), int)
      at = at.reshape(count, rows)
      yield x[at].astype(np.float32), labels[at]

  return _fitted(batches(), (mean, std), num_classes, grid, steps, layers)


def steps_of(
  features: Iterable[Rows], steps: int, rows: int, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields features and labels of the steps, in the parts of `chunks`.

  The label of an image that does not count, such as a broken one, is -1.
  """
  x, labels = np.zeros((0, width), np.float32), np.zeros(0, np.int32)
  batches = iter(features)
  for count in chunks(steps, rows, width):
    read = [(x, labels)]
    num = len(x)
    while num < count * rows:
      batch = next(batches)
      num += len(batch["x"])
      label = np.where(batch["mask"], batch["label"], -1)
      read.append((batch["x"].astype(np.float32), label.astype(np.int32)))
    x, labels = (np.concatenate(part) for part in zip(*read, strict=True))
    end = count * rows
    yield x[:end].reshape(count, rows, width), labels[:end].reshape(count, rows)
    x, labels = x[end:], labels[end:]


def _fitted(
  batches: Iterable[tuple[np.ndarray, np.ndarray]],
  whitening: tuple[np.ndarray, np.ndarray],
  num_classes: int,
  grid: list[tuple[float, float]],
  steps: int,
  layers: np.ndarray,
) -> Heads:
  """Returns heads trained on one device; see `train_heads`.

  Args:
    batches: Features [n, rows, d] and labels [n, rows] of the next n steps.
    whitening: Mean and standard deviation of the features.
    num_classes: Number of classes.
    grid: (learning rate, weight decay) of each head.
    steps: Number of steps.
    layers: See `train_heads`.
  """
  import jax

  trained = training(tuple(grid), steps)
  with jax.default_device(jax.local_devices()[0]):
    shapes = _state(*layers.shape, num_classes)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    state = jax.device_put(state)
    for x, labels in batches:
      batch = x, labels.astype(np.int32)
      before, state = state, trained(state, batch, *whitening, layers)
      jax.block_until_ready(before)  # few batches are on the device
  return Heads(*whitening, *jax.device_get(state[0]))


def chunks(steps: int, rows: int, width: int) -> Iterator[int]:
  """Yields the number of steps of each part that is sent to the device.

  Args:
    steps: Number of all steps.
    rows: Images per step.
    width: Length of a feature.

  Example:
    >>> list(chunks(steps=40, rows=1024, width=1024))
    [16, 16, 8]
  """
  chunk = max(1, min(steps, FETCHED // (rows * width)))
  for start in range(0, steps, chunk):
    yield min(chunk, steps - start)


def _state(num: int, width: int, num_classes: int) -> tuple:
  """Returns the shapes of heads, and of the states of their optimizers."""
  import jax

  array = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
  heads = array(num, width, num_classes), array(num, num_classes)
  return heads, jax.eval_shape(jax.vmap(_optimizer(0.0, 1).init), heads)


def _optimizer(rate, steps: int):
  """Returns optax's gradient descent, whose rate falls to zero in `steps`."""
  import optax

  fall = optax.cosine_decay_schedule(1.0, steps)
  return optax.sgd(lambda step: rate * fall(step), MOMENTUM)


@functools.cache
def training(grid: tuple[tuple[float, float], ...], steps: int) -> Callable:
  """Returns a jitted function (state, batches, mean, std, layers) -> state.

  `_state` has the shapes of the state: kernels float32 [grid, d, classes] and
  biases float32 [grid, classes], and the states of the optimizers. Batches of n
  steps have features float32 [n, rows, d] and labels int32 [n, rows] (-1 does
  not count). mean and std are float32 [d], layers [grid, d].

  Args:
    grid: (learning rate, weight decay) of each head.
    steps: Number of all steps, in which the learning rates fall to 0.
  """
  import jax
  import jax.numpy as jnp
  import optax

  rates, decays = np.array(grid, np.float32).T

  def loss_of(head, x, labels, decay):
    kernel, bias = head
    logits = jnp.matmul(x, kernel, precision="highest") + bias[None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    num = jnp.maximum(jnp.sum(labels >= 0), 1)
    mean = jnp.sum(losses * (labels >= 0)) / num
    return mean + decay / 2 * jnp.sum(kernel**2)

  def update(head, state, x, labels, rate, decay, layer):
    kernel, bias = jax.grad(loss_of)(head, x, labels, decay)
    grads = kernel * layer[:, None], bias
    updates, state = _optimizer(rate, steps).update(grads, state)
    return optax.apply_updates(head, updates), state

  updates = jax.vmap(update, in_axes=(0, 0, None, None, 0, 0, 0))

  @jax.jit
  def trained(state, batches, mean, std, layers):
    def step(state, batch):
      x, labels = batch
      x = (x - mean[None]) / std[None]
      return updates(*state, x, labels, rates, decays, layers), None

    return jax.lax.scan(step, state, batches)[0]

  return trained


def order_of(num: int, seed: int) -> Iterator[int]:
  """Yields indices of rows without end, a permutation in each epoch."""
  for epoch in itertools.count():
    yield from np.random.default_rng((seed, epoch)).permutation(num).tolist()
