"""Attentive probe: a learned query reads the frozen tokens of the last block.

A linear probe sees one vector per image, in which models of masked images have
little: what they know is spread over the patches. Here the pooling is learned,
too: one layer of cross-attention with one query q and as many heads as the
model has, and a linear classifier:

  x = (token - mean) / (std + 1e-5), a_h = softmax(q_h . W_h x / sqrt(d_h))
  logits = [sum a_h V_h x, for each head h] W + b

The tokens are all of the last block after the final norm: class token,
registers and patches. A tenth of the training split is held out. On the rest,
one probe is trained for each learning rate, all at once on the same batches;
the one that is best on the held-out tenth is scored once on the test split.
AdamW; the rates fall to zero along a cosine.

Source: AIM (arXiv:2401.08541; apple/ml-aim, AttentionPoolingClassifier);
V-JEPA (arXiv:2404.08471) has an MLP behind the attention. AIM's batch norm
without parameters is here a fixed mean and deviation, of the first training
images. Their probes see the images for 20 epochs and more: for ImageNet set
`steps` to 100,000, and `train_ops` to the augmentation.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vit_jax.batch import DataError
from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Answers,
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Split,
  Splits,
  multilabel_error,
  no_images_error,
)
from vit_jax.evaluators.features import learns_from
from vit_jax.evaluators.linear import (
  STD_FLOOR,
  chunks,
  is_held_out,
  num_held_out,
  order_of,
  steps_of,
)
from vit_jax.options import option, unexpected

STEP_IMAGES = 256  # images per step; fewer if there are not as many
STORED_BYTES = 2**34  # most bytes of tokens in the memory of the host
Probe = dict[str, Any]  # its arrays by name, see `shapes`


@dataclasses.dataclass(frozen=True)
class AttentiveConfig(EvaluatorConfig):
  """Cross-attention and a linear layer, trained on frozen tokens."""

  name: str = "attentive"
  kind: str = "attentive"
  train_split: str = option("train", "training split")
  lrs: tuple[float, ...] = option(
    (0.0001, 0.0003, 0.001, 0.003),
    "peak learning rates of the grid; widen the grid if the first or the last"
    " is best",
  )
  weight_decay: float = option(0.1, "weight decay of AdamW")
  train_ops: str | None = option(
    None,
    "preprocessing of the training images, which pass through the model anew in"
    " each epoch; None: `ops`, once, and the tokens are stored in memory",
  )
  steps: int = option(10_000, "training steps of the probes, of 256 images")
  seed: int = option(0, "seed of held-out images, batches and first weights")

  SPLITS: ClassVar[tuple[str, ...]] = ("train_split", "split")

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    for name, is_right, expected in (
      ("lrs", min(self.lrs, default=0) > 0, "numbers above 0"),
      ("weight_decay", self.weight_decay >= 0, "0 or more"),
      ("steps", self.steps >= 1, "1 or more"),
      ("seed", self.seed >= 0, "0 or more"),
    ):
      if not is_right:
        yield unexpected(f"{where}.{name}", getattr(self, name), expected)

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields errors for a model without tokens, or data that do not fit."""
    train = sources["train_split"]
    num = train.num_examples
    if sources["split"].is_multilabel:
      yield multilabel_error(where, sources["split"])
    if num < 10:
      yield (
        f"{where}.train_split: got {num} images, of which a tenth is held out"
        " to choose the probe; expected 10 or more."
      )
    if "encoded" not in out:
      yield (
        f"{where}.kind: got 'attentive', but the model has no tokens; expected"
        " 'linear' or 'knn'."
      )
      return
    size = 2 * math.prod(out["encoded"].shape) * num
    if self.train_ops is None and size > STORED_BYTES:
      yield (
        f"{where}.train_ops: got None, with which the tokens of {num:,} images"
        f" take {size / 2**30:,.0f} GiB of memory, expected at most"
        f" {STORED_BYTES / 2**30:.0f}; {where}.train_ops='{self.ops}' stores"
        " none and computes them in each epoch."
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
    return AttentiveProbe(context)


class Sizes(NamedTuple):
  """Sizes of a probe.

  width: Length of a token.
  num_heads: Heads of the attention.
  num_classes: Number of classes.
  """

  width: int
  num_heads: int
  num_classes: int


class Probes(NamedTuple):
  """Probes of a grid on one device, and the whitening of their tokens.

  arrays: The arrays of `shapes`, each with a first axis for the grid.
  mean: float32 [d].
  std: float32 [d].
  """

  arrays: Probe
  mean: np.ndarray
  std: np.ndarray


class AttentiveProbe(Evaluator):
  """Scores frozen tokens by the best attentive probe of a grid.

  With fake data only the first two batches of each split are read.
  """

  def __init__(self, context: Context):
    super().__init__(context)
    train, test = (context.sources[k] for k in ("train_split", "split"))
    self.note = learns_from(self.config, train, test)
    self._train, self._test = (self.few_if_fake(s) for s in (train, test))
    size = context.config.model.size
    self._sizes = Sizes(size.width, size.num_heads, train.num_classes)

    def tokens(params, batch):
      _, out = context.predict(params, batch["image"])
      # In one axis, as the features of `linear`; half of the bytes of float32.
      x = out["encoded"].reshape(len(batch["label"]), -1).astype("float16")
      return {"x": x, **{k: batch[k] for k in ("label", "mask", "index")}}

    self._tokens = context.once("attentive tokens", lambda: context.jit(tokens))

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"features": self._tokens}

  def gather(self, params: Params) -> dict[str, float]:
    """Returns the scores; each process trains the same probes on one device.

    Raises:
      DataError: No image of a part of the data has a label.
    """
    import jax

    options, sizes = self.config, self._sizes
    is_out = is_held_out(self._train.num_examples, options.seed)
    chosen, held_out = np.flatnonzero(~is_out), np.flatnonzero(is_out)
    read = functools.partial(self._rows, params)
    with jax.default_device(jax.local_devices()[0]):
      probes = fitted(
        self._batches(params, chosen), sizes, options, self._steps
      )
      num_right, count = np.zeros(len(options.lrs)), 0
      for rows, is_used in read(self._train, held_out):
        y = np.asarray(logits(sizes)(probes, rows["x"]))[:, is_used]
        is_right = y.argmax(-1) == rows["label"][is_used]
        is_finite = np.isfinite(y).all((1, 2))  # of a probe that diverged
        num_right += np.where(is_finite, is_right.sum(1), np.nan)
        count += is_used.sum()
      accuracies = num_right / count
      # The first of several best ones; one that diverged only if all did.
      best = int(np.nan_to_num(accuracies, nan=-1.0).argmax())
      one = jax.tree.map(lambda v: v[best : best + 1], probes.arrays)
      probes = probes._replace(arrays=one)
      parts = []
      for rows, is_used in read(self._test, None):
        y = logits(sizes)(probes, rows["x"])[0]
        p = np.asarray(jax.nn.softmax(y))[is_used]
        label, index = rows["label"][is_used], rows["index"][is_used]
        at, prediction = np.arange(len(p)), p.argmax(1)
        scores = p[at, prediction], p[at, label]
        parts.append((index, label, prediction, *scores))
    # Batches come in the order of the processes, not of the records.
    index, *columns = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(index)
    label, prediction, score, of_label = (c[order] for c in columns)
    has_diverged = np.isnan(accuracies[best]) or not np.isfinite(score).all()
    lr = options.lrs[best]
    self.answers = None
    if not has_diverged:
      self.answers = Answers(
        f"the attentive probe with learning rate {lr:g}",
        "probability",
        index[order],
        label,
        prediction,
        score,
        of_label,
      )
    top1 = np.nan if has_diverged else np.mean(prediction == label)
    scores = {
      "top1": top1,
      "held_out": accuracies[best],
      "lr": np.nan if np.isnan(accuracies[best]) else lr,
      "count": len(label),
    }
    return {f"{options.name}/{k}": float(v) for k, v in scores.items()}

  def score(self, gathered: dict[str, float]) -> dict[str, float]:
    """Returns `<name>/top1`, the accuracy of the chosen probe on the split.

    Other metrics are `held_out`, its accuracy on the held-out images; its `lr`;
    and `count`, the number of test images. If all probes diverged, all metrics
    except `count` are NaN.
    """
    return gathered

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """See `Evaluator`."""
    import jax

    options, num = self.config, self._train.num_examples
    rows = min(STEP_IMAGES, num - num_held_out(num))
    array = jax.ShapeDtypeStruct
    grid = len(options.lrs)
    stats = array((self._sizes.width,), np.float32)
    programs = {}
    for steps in {*chunks(self._steps, rows, width)}:
      batches = (
        array((steps, rows, width), np.float16),
        array((steps, rows), np.int32),
      )
      programs[f"probes of {steps} steps"] = (
        training(self._sizes, options.lrs, options.weight_decay, self._steps),
        (state_shapes(self._sizes, grid), batches, stats, stats),
      )
    return programs

  @property
  def _steps(self) -> int:
    return 2 if self.context.config.fake_data else self.config.steps

  def _rows(
    self, params: Params, source: Split, indices: np.ndarray | None
  ) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yields the rows of each batch, and which of them count, bool [b]."""
    batches = self.context.batches(source, indices)
    num = 0
    for rows in self.context.forward(self._tokens, params, batches):
      is_used = rows["mask"] & (rows["label"] >= 0)
      num += is_used.sum()
      if is_used.any():
        yield rows, is_used
    if not num:
      what = "has a label"
      raise DataError(no_images_error(self.config.name, source, what))

  def _batches(
    self, params: Params, chosen: np.ndarray
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tokens [n, rows, width] and labels [n, rows] of the next n steps.

    Args:
      params: Parameters of the model.
      chosen: The records to learn from.
    """
    options, source, steps = self.config, self._train, self._steps
    if options.train_ops is None:
      x, labels, index = None, [], []
      for part, is_used in self._rows(params, source, chosen):
        if x is None:
          x = np.empty((len(chosen), part["x"].shape[1]), part["x"].dtype)
        x[len(labels) : len(labels) + is_used.sum()] = part["x"][is_used]
        labels += part["label"][is_used].tolist()
        index += part["index"][is_used].tolist()
      # Of any number of processes the same: in the order of the records.
      records, labels = np.argsort(index), np.array(labels, np.int32)
      rows = min(STEP_IMAGES, len(labels))
      order = order_of(len(labels), options.seed)
      for count in chunks(steps, rows, x.shape[1]):
        at = records[np.fromiter(itertools.islice(order, count * rows), int)]
        at = at.reshape(count, rows)
        yield x[at], labels[at]
      return
    rows = min(STEP_IMAGES, len(chosen))
    batches = self.context.augmented(
      source, chosen, options.train_ops, options.seed
    )
    needed = -(-steps * rows // options.batch_size)
    features = self.context.forward(
      self._tokens, params, itertools.islice(batches, needed)
    )
    first = next(features)
    width, dtype = first["x"].shape[1], first["x"].dtype
    features = itertools.chain([first], features)
    for x, labels in steps_of(features, steps, rows, width):
      yield x.astype(dtype), labels


def fitted(
  batches: Iterable[tuple[np.ndarray, np.ndarray]],
  sizes: Sizes,
  options: AttentiveConfig,
  steps: int,
) -> Probes:
  """Trains a probe for each learning rate, at once, on the default device.

  Args:
    batches: Tokens [n, rows, tokens * d] and labels [n, rows] of the next n
      steps; -1 does not count. The first ones have the mean and the deviation
      with which all tokens are whitened.
    sizes: Sizes of a probe.
    options: Learning rates, weight decay and seed.
    steps: Number of steps.
  """
  import jax

  batches = iter(batches)
  first = next(batches)
  x = first[0][first[1] >= 0].reshape(-1, sizes.width)
  mean = x.mean(0, dtype=np.float64).astype(np.float32)
  std = x.std(0, dtype=np.float64).astype(np.float32) + STD_FLOOR
  trained = training(sizes, options.lrs, options.weight_decay, steps)
  state = initial(sizes, options.seed, len(options.lrs))
  for x, labels in itertools.chain([first], batches):
    before, state = state, trained(state, (x, labels), mean, std)
    jax.block_until_ready(before)  # few batches are on the device
  return Probes(state[0], mean, std)


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
  """Returns name -> shape of the arrays of a probe.

  Example:
    >>> shapes(Sizes(width=6, num_heads=2, num_classes=10))["value"]
    (6, 2, 3)
  """
  d, h, classes = sizes
  return {
    "query": (h, d // h),
    "key": (d, h, d // h),
    "value": (d, h, d // h),
    "kernel": (d, classes),
    "bias": (classes,),
  }


def initial(sizes: Sizes, seed: int, grid: int) -> tuple[Probe, Any]:
  """Returns equal probes, and the states of their optimizers.

  Query, keys and values are normal with the deviations 0.02, and 1 / sqrt(d);
  the classifier starts at zero.
  """
  import jax
  import jax.numpy as jnp

  rng = np.random.default_rng(seed)
  deviation = {"query": 0.02, "key": sizes.width**-0.5}
  deviation["value"] = deviation["key"]
  probe = {
    k: rng.normal(0, deviation.get(k, 0), shape).astype(np.float32)
    for k, shape in shapes(sizes).items()
  }
  probes = jax.tree.map(lambda v: jnp.asarray(np.stack([v] * grid)), probe)
  return probes, jax.vmap(_optimizer(0.0, 0.0, 1).init)(probes)


def state_shapes(sizes: Sizes, grid: int) -> tuple[Probe, Any]:
  """Returns the shapes of `initial`."""
  import jax

  return jax.eval_shape(lambda: initial(sizes, 0, grid))


def _optimizer(rate, weight_decay: float, steps: int):
  """Returns optax's AdamW, whose rate falls to zero in `steps`."""
  import optax

  fall = optax.cosine_decay_schedule(1.0, steps)
  return optax.adamw(lambda t: rate * fall(t), weight_decay=weight_decay)


def _scores(sizes: Sizes, probe: Probe, x):
  """Returns logits [b, classes] of one probe for whitened tokens [b, n, d].

  The query is multiplied with the keys' matrix first, and the weighted sum of
  tokens with the values' matrix: the same products in another order, without
  two of d x d for each token.
  """
  import jax
  import jax.numpy as jnp

  einsum = functools.partial(jnp.einsum, precision="highest")
  query = einsum("he,dhe->dh", probe["query"], probe["key"])
  scale = (sizes.width // sizes.num_heads) ** -0.5
  weights = jax.nn.softmax(einsum("bnd,dh->bnh", x, query) * scale, axis=1)
  pooled = einsum("bnh,bnd->bhd", weights, x)
  values = einsum("bhd,dhe->bhe", pooled, probe["value"])
  values = values.reshape(len(x), -1)
  return einsum("bd,dc->bc", values, probe["kernel"]) + probe["bias"][None]


def _white(sizes: Sizes, x, mean, std):
  """Returns whitened tokens, float32 [b, n, d], of rows [b, n * d]."""
  x = x.astype("float32").reshape(len(x), -1, sizes.width)
  return (x - mean[None, None]) / std[None, None]


@functools.cache
def logits(sizes: Sizes) -> Callable:
  """Returns a jitted function of probes and tokens [b, n * d].

  Its result are logits [grid, b, classes].

  Args:
    sizes: Sizes of a probe.
  """
  import jax

  @jax.jit
  def logits(probes, x):
    x = _white(sizes, x, probes.mean, probes.std)
    return jax.vmap(lambda probe: _scores(sizes, probe, x))(probes.arrays)

  return logits


@functools.cache
def training(
  sizes: Sizes, lrs: tuple[float, ...], weight_decay: float, steps: int
) -> Callable:
  """Returns a jitted function (state, batches, mean, std) -> state.

  The state is that of `initial`. Batches of m steps have tokens [m, rows, n *
  d] and labels int32 [m, rows] (-1 does not count); mean and std are float32
  [d].

  Args:
    sizes: Sizes of a probe.
    lrs: Learning rate of each probe.
    weight_decay: Of all arrays.
    steps: Number of all steps, in which the learning rates fall to 0.
  """
  import jax
  import jax.numpy as jnp
  import optax

  def loss_of(probe, x, labels):
    y = _scores(sizes, probe, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(y, labels)
    counts = labels >= 0
    return jnp.sum(losses * counts) / jnp.maximum(jnp.sum(counts), 1)

  def update(probe, state, x, labels, lr):
    grads = jax.grad(loss_of)(probe, x, labels)
    optimizer = _optimizer(lr, weight_decay, steps)
    updates, state = optimizer.update(grads, state, probe)
    return optax.apply_updates(probe, updates), state

  updates = jax.vmap(update, in_axes=(0, 0, None, None, 0))

  @jax.jit
  def trained(state, batches, mean, std):
    def step(state, batch):
      x, labels = batch
      x = _white(sizes, x, mean, std)
      return updates(*state, x, labels, np.array(lrs, np.float32)), None

    return jax.lax.scan(step, state, batches)[0]

  return trained
