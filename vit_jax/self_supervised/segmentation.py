"""Linear segmentation: a linear map from frozen patches to classes of pixels.

A head is trained on the training images, and scored on the validation images:

  logits = batch_norm(patches) W + b, resized to the pixels
  loss = cross-entropy, mean over the pixels that count
  IoU of a class = pixels that are and are predicted to be of it
    / pixels that are or are predicted to be of it
  miou = mean IoU of the classes that occur in masks or predictions

The images are a data set `images:/path` with the folders train and val, the
masks PNG files of the same names in another folder:

  /path/images/train/a.jpg   /path/masks/train/a.png
  /path/images/val/b.jpg     /path/masks/val/b.png

A pixel of a mask is the number of its class; 255 does not count. Folders may
have any of the names in `splits.SPLIT_FOLDERS`, and folders inside.

DINOv2's recipe (arXiv:2304.07193, section 7.4; the published config of its head
on ADE20k): 40,000 steps of 16 images, AdamW with rate 1e-3, betas 0.9 and 0.999
and weight decay 1e-4, a warm-up of 1,500 steps, then a line to 0; batch norm
and a 1 x 1 convolution (normal, 0.01) on the last block's patches after the
final norm ("+ms": of the last four blocks). These are the defaults here.
DINOv3's (facebookresearch/dinov3, config-ade20k-linear-training.yaml): the same
with weight decay 1e-3, a cosine to 0, and dropout 0.1 of channels.

What differs: an image is resized as a whole, to a square, where the authors
train on crops of 512 px of images enlarged by 0.5 to 2, flipped and (DINOv2) of
changed colours, and score windows of 512 px every 341 px, for "+ms" of several
sizes (640 px). There is no dropout. So expect less than their numbers.

Published mIoU on ADE20k (dataset=images:ADE20k/images,
masks=ADE20k/annotations, classes=150, zero_is_ignored=true), not run here:
  DINOv3 7B/16   55.9
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.batch import DataError
from vit_jax.class_names import Head as ClassHead
from vit_jax.data.images import FORMATS
from vit_jax.data.preprocessing import image_size, parse_ops, turns_upright
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Split,
  Splits,
)
from vit_jax.evaluators.features import intermediate, num_blocks
from vit_jax.options import ABOVE_0, AT_LEAST_0, AT_LEAST_1, option, unexpected

if TYPE_CHECKING:
  import jax

  from vit_jax.families import ModelConfig

STEP_IMAGES = 16  # images of a step of the head
WARMUP = 1500 / 40_000  # share of the steps
IGNORED = 255  # a pixel that does not count
BN_MOMENTUM, BN_EPS = 0.1, 1e-5
STORED = 2**32  # bytes of patches and masks that are kept; more are recomputed
BAND = 2**24  # logits of pixels computed at a time
PREFIX = "images:"
_PART_OF = {
  name: part for part in ("train", "val") for name in SPLIT_FOLDERS[part]
}


@dataclasses.dataclass(frozen=True)
class SegmentationConfig(EvaluatorConfig):
  """A linear map from frozen patches to classes of pixels, scored by mIoU."""

  name: str = "segmentation"
  kind: str = "segmentation"
  split: str = option("train", "split with all images of an images:/path")
  ops: str = option(
    "decode|resize(512)", "preprocessing: decode and a resize of the whole"
  )
  masks: str = option(
    "", "folder of the masks: PNG files of the images' names, below train, val"
  )
  classes: int = option(0, "number of classes that count, 2 to 255")
  zero_is_ignored: bool = option(
    False,
    "whether pixels of 0 do not count, and the first class is 1; ADE20k: true",
  )
  blocks: int = option(
    1, "last blocks whose patches are joined; DINOv2's +ms: 4", limit=AT_LEAST_1
  )
  lr: float = option(1e-3, "peak learning rate of AdamW", limit=ABOVE_0)
  weight_decay: float = option(
    1e-4, "of AdamW, times the rate; DINOv3: 1e-3", limit=AT_LEAST_0
  )
  steps: int = option(40_000, "training steps of 16 images", limit=AT_LEAST_1)
  seed: int = option(0, "seed of the head and of the order", limit=AT_LEAST_0)

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if not self.masks:
      yield f"{where}.masks: got none, expected the folder of the masks."
    if not 2 <= self.classes <= IGNORED:
      yield unexpected(f"{where}.classes", self.classes, "2 to 255")
    try:
      names = [op.name for op in parse_ops(self.ops)]
    except ValueError:  # it is reported for all evaluators
      return
    if names not in (["decode"], ["decode", "resize"]):
      expected = "decode|resize(...): masks are those of whole images"
      yield unexpected(f"{where}.ops", repr(self.ops), expected)

  def model_errors(self, where: str, model: "ModelConfig") -> Iterator[str]:
    """Yields an error if the model lacks the blocks."""
    if self.blocks == 1:
      return
    depth = num_blocks(model) or 1
    if self.blocks > depth:
      yield unexpected(f"{where}.blocks", self.blocks, f"1 to {depth}")
    has_norm = getattr(model, "final_norm", "tokens") == "tokens"
    if None in (model.AFTER_BLOCK, model.LAST_NORM) or not has_norm:
      expected = (
        f"1: {model.variant} has no final norm of tokens behind a block"
      )
      yield unexpected(f"{where}.blocks", self.blocks, expected)

  def check(
    self, where: str, sources: Splits, head: ClassHead, out: Outputs
  ) -> Iterator[str]:
    """Yields an error if there are no patches, or an image has no mask."""
    source = sources["split"]
    if "encoded" not in out:
      yield f"{where}.kind: got a model without tokens, expected a ViT."
    if not source.name.startswith(PREFIX):
      yield unexpected(f"{where}.dataset", repr(source.name), "images:/path")
    elif (files := files_of(source, self.masks)) is not None:
      yield from files.errors(where)

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Segmentation(context)


class Files(NamedTuple):
  """Images of a source by part, train and val, and their masks.

  images: The path of each record.
  masks: The path of each record's mask.
  parts: Part -> numbers of its records, int64 [n], rising.
  """

  images: tuple[str, ...]
  masks: tuple[str, ...]
  parts: dict[str, np.ndarray]

  def errors(self, where: str) -> Iterator[str]:
    """Yields errors of a part without images, and of images without a mask."""
    for part, numbers in self.parts.items():
      if not len(numbers):
        got = f"images without a folder {part!r}"
        yield unexpected(f"{where}.dataset", got, "folders train and val")
    numbers = np.concatenate([*self.parts.values()])
    absent = [i for i in numbers if not os.path.isfile(self.masks[i])]
    if absent:
      got = (
        f"no mask for {len(absent):,} of {len(numbers):,} images, such as"
        f" {self.images[absent[0]]}"
      )
      yield unexpected(f"{where}.masks", got, self.masks[absent[0]])


def files_of(source: Split, masks: str) -> Files | None:
  """Returns the files of a source; None if it is fake.

  Args:
    source: A source of `images:/path`.
    masks: Folder of the masks.
  """
  if (images := getattr(source, "paths", None)) is None:
    return None
  root = pathlib.Path(source.name.removeprefix(PREFIX)).expanduser().absolute()
  below = [os.path.relpath(path, root) for path in images]
  folders = [path.split(os.sep)[0].lower() for path in below]
  part_of = np.array([_PART_OF.get(name, "") for name in folders])
  folder = os.path.expanduser(masks)
  return Files(
    images,
    tuple(
      os.path.join(folder, os.path.splitext(path)[0] + ".png") for path in below
    ),
    {part: np.flatnonzero(part_of == part) for part in ("train", "val")},
  )


def read_mask(
  path: str,
  image: str,
  classes: int,
  zero_is_ignored: bool = False,
  upright: bool = True,
) -> np.ndarray:
  """Returns the classes of pixels, uint8 [h, w]; 255 does not count.

  Args:
    path: A PNG of one channel, or with a palette.
    image: Path of its image, whose size it must have.
    classes: Number of classes.
    zero_is_ignored: See `SegmentationConfig`.
    upright: Whether the image is turned by its EXIF orientation.

  Raises:
    DataError: It cannot be read, has colours or another size, or a class that
      does not exist.
  """
  from PIL import Image

  try:
    with Image.open(path, formats=("PNG",)) as file:
      mode, mask = file.mode, np.asarray(file)
    with Image.open(image, formats=FORMATS) as file:
      size = file.size
      if upright and file.getexif().get(0x0112, 1) >= 5:  # on its side
        size = size[::-1]
  except OSError as e:
    raise DataError(f"{path}: cannot be read: {e}") from None
  if mask.ndim != 2:
    expected = "one channel, or a palette, with the class of each pixel"
    raise DataError(unexpected(path, f"colours ({mode})", expected))
  if mask.shape[::-1] != size:
    got = "a mask of {} x {} pixels".format(*mask.shape[::-1])
    expected = "{} x {}, the size of {}".format(*size, image)
    raise DataError(unexpected(path, got, expected))
  mask = mask.astype(np.int64)
  counts = mask != IGNORED
  if zero_is_ignored:
    counts &= mask != 0
    mask = mask - 1
  wrong = mask[counts & ((mask < 0) | (mask >= classes))]
  if len(wrong):
    first = int(zero_is_ignored)
    expected = f"{first} to {classes - 1 + first}, or 255 (does not count)"
    raise DataError(unexpected(path, f"class {wrong[0] + first}", expected))
  return np.where(counts, mask, IGNORED).astype(np.uint8)


class Head(NamedTuple):
  """Batch norm over channels, and a linear map."""

  mean: np.ndarray  # float32 [d]
  variance: np.ndarray  # float32 [d]
  scale: np.ndarray  # float32 [d]
  bias: np.ndarray  # float32 [d]
  kernel: np.ndarray  # float32 [d, classes]
  offset: np.ndarray  # float32 [classes]

  def logits(self, patches: np.ndarray) -> np.ndarray:
    """Returns logits [gh, gw, classes] of the patches [gh, gw, d]."""
    scale = self.scale / np.sqrt(self.variance + BN_EPS)
    x = (patches.astype(np.float32) - self.mean) * scale + self.bias
    return x @ self.kernel + self.offset


class Segmentation(Evaluator):
  """Trains a head on the patches of the training images, and scores it."""

  def __init__(self, context: Context):
    super().__init__(context)
    options, model = self.config, context.config.model
    self._source = self.few_if_fake(context.sources["split"])
    self._files = files_of(context.sources["split"], options.masks)
    self._parts = _halves(self._source.num_examples)
    if self._files is not None:
      self._parts = self._files.parts
    self._size = image_size(options.ops)
    self._grid = model.grid(self._size)
    num = {part: len(numbers) for part, numbers in self._parts.items()}
    self.note = (
      f"{options.dataset}, learns from {num['train']:,} images, scored on"
      f" {num['val']:,}; {options.classes} classes of pixels"
    )

    def patches(params, batch):
      _, out = context.predict(params, batch["image"])
      x = patches_of(out, params, model, self._grid, options.blocks)
      return {"x": x, "mask": batch["mask"], "index": batch["index"]}

    self._patches = context.once(
      ("patches", options.blocks), lambda: context.jit(patches)
    )

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"patches": self._patches}

  def gather(self, params: Params) -> np.ndarray:
    """Returns the confusion matrix; each process trains the same head.

    Raises:
      DataError: See `read_mask`; or no image can be decoded.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
      head = train_head(
        self._batches(params, pool),
        self._grid,
        self._size,
        self.config,
        2 if self.context.config.fake_data else self.config.steps,
      )
      return self._confusion(params, head, pool)

  def score(self, gathered: np.ndarray) -> dict[str, float]:
    """Returns `<name>/miou` and `<name>/pixel_accuracy`, shares from 0 to 1."""
    name = self.config.name
    return {
      f"{name}/miou": miou(gathered),
      f"{name}/pixel_accuracy": float(
        gathered.trace() / max(1, gathered.sum())
      ),
    }

  def _rows(self, params: Params, numbers: np.ndarray) -> Iterator[tuple]:
    """Yields the patches and the number of each record, in order."""
    batches = self.context.batches(self._source, numbers)
    for rows in self.context.forward(self._patches, params, batches):
      for i in np.flatnonzero(rows["mask"]):
        yield rows["x"][i], int(rows["index"][i])

  def _shuffled(
    self, params: Params
  ) -> Iterator[tuple[np.ndarray, np.ndarray | None, int]]:
    """Yields patches, and the number of their record, without end."""
    numbers, options = self._parts["train"], self.config
    batches = self.context.augmented(
      self._source, numbers, options.ops, options.seed
    )
    for rows in self.context.forward(self._patches, params, batches):
      for i in np.flatnonzero(rows["mask"]):
        yield rows["x"][i], int(numbers[rows["index"][i]])

  def _batches(
    self, params: Params, pool: concurrent.futures.Executor
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields patches [b, gh, gw, d] and masks [b, h, w] without end."""
    numbers = self._parts["train"]
    rows = self._rows(params, numbers)
    first = next(rows, None)
    if first is None:
      name = self.config.name
      raise DataError(
        f"config.evals.{name}: got training images of {self._source.name!r}"
        " that cannot be decoded, expected others."
      )
    height, width = self._size
    if len(numbers) * (first[0].nbytes + height * width) > STORED:
      rows.close()
      endless = self._shuffled(params)
      while True:
        x, at = zip(*itertools.islice(endless, STEP_IMAGES), strict=True)
        yield np.stack(x), np.stack([*pool.map(self._target, at)])
    x, at = zip(first, *rows, strict=True)
    x, masks = np.stack(x), np.stack([*pool.map(self._target, at)])
    order = _order(len(x), self.config.seed)
    while True:
      chosen = [*itertools.islice(order, min(STEP_IMAGES, len(x)))]
      yield x[chosen], masks[chosen]

  def _mask(self, number: int) -> np.ndarray:
    """Returns the mask of a record, uint8 [h, w]."""
    options = self.config
    if self._files is None:  # fake data
      rng = np.random.default_rng(number)
      return rng.integers(0, options.classes, self._size, np.uint8)
    return read_mask(
      self._files.masks[number],
      self._files.images[number],
      options.classes,
      options.zero_is_ignored,
      turns_upright(options.ops),
    )

  def _target(self, number: int) -> np.ndarray:
    """Returns the mask of a record in the size of `ops`."""
    from PIL import Image

    mask = Image.fromarray(self._mask(number))
    return np.asarray(mask.resize(self._size[::-1], Image.Resampling.NEAREST))

  def _confusion(
    self, params: Params, head: Head, pool: concurrent.futures.Executor
  ) -> np.ndarray:
    """Returns the confusion matrix of the validation images."""
    import jax

    def of_image(x, number):
      mask = self._mask(number)
      predicted = predictions(head.logits(x), mask.shape)
      return confusion(predicted, mask, self.config.classes)

    total = np.zeros((self.config.classes,) * 2, np.int64)
    waiting: collections.deque = collections.deque()
    for i, row in enumerate(self._rows(params, self._parts["val"])):
      # All processes have all rows; each scores a part of them.
      if i % jax.process_count() == jax.process_index():
        waiting.append(pool.submit(of_image, *row))
      if len(waiting) > 2 * STEP_IMAGES:
        total += waiting.popleft().result()
    total += sum(future.result() for future in waiting)
    return of_all_processes(total)


def of_all_processes(counts: np.ndarray) -> np.ndarray:
  """Returns the sum of the processes' counts, int64 [..., n]. Collective."""
  import jax
  from jax.experimental import multihost_utils

  if jax.process_count() == 1:
    return counts
  # As uint32, because jax has no int64 by default.
  parts = multihost_utils.process_allgather(counts.view(np.uint32))
  return np.asarray(parts).view(np.int64).sum(0)


def patches_of(
  out: Outputs,
  params: Params,
  model: "ModelConfig",
  grid: tuple[int, int],
  blocks: int,
) -> "jax.Array":
  """Returns the patches of the last blocks after the final norm, joined.

  Args:
    out: Intermediates of the model.
    params: Parameters of the model, which have the final norm.
    model: Options of the model.
    grid: Rows and columns of patches.
    blocks: Number of blocks.

  Returns:
    [b, gh, gw, blocks * d], of the model's dtype.
  """
  import flax.linen as nn
  import jax.numpy as jnp

  def of_block(i):
    if i == depth - 1:
      return intermediate(out, "encoded")
    norm = nn.LayerNorm(model.ln_eps, dtype=jnp.float32)
    of_norm = functools.reduce(dict.get, model.LAST_NORM.split("/"), params)
    x = intermediate(out, model.AFTER_BLOCK.format(i))
    return norm.apply({"params": of_norm}, x)

  depth = num_blocks(model) or 1
  rows, columns = grid
  every = [
    of_block(i)[:, -rows * columns :].astype(model.dtype)
    for i in range(depth - blocks, depth)
  ]
  x = jnp.concatenate(every, -1)
  return x.reshape(len(x), rows, columns, -1)


def train_head(
  batches: Iterable[tuple[np.ndarray, np.ndarray]],
  grid: tuple[int, int],
  size: tuple[int, int],
  options: SegmentationConfig,
  steps: int,
) -> Head:
  """Returns a head trained on one device.

  Args:
    batches: Patches [b, gh, gw, d] and masks uint8 [b, h, w] of each step.
    grid: (gh, gw).
    size: (h, w).
    options: classes, lr, weight_decay and seed are used.
    steps: Number of steps.
  """
  import jax

  with jax.default_device(jax.local_devices()[0]):
    state = update = None
    for x, masks in itertools.islice(batches, steps):
      if state is None:
        start, update = training(
          x.shape[-1], options.classes, options.lr, options.weight_decay, steps
        )(grid, size)
        state = start(options.seed)
      before, state = state, update(state, x, masks)
      jax.block_until_ready(before[1]["mean"])  # few batches are on the device
    trained, statistics, _ = jax.device_get(state)
  return Head(**statistics, **trained)


@functools.cache
def training(
  width: int, classes: int, lr: float, weight_decay: float, steps: int
) -> Callable:
  """Returns a function (grid, size) -> (start, update), of a head.

  start(seed) returns the first state: parameters, the statistics of the batch
  norm, and the optimizer's state. update(state, patches, masks) returns the
  next one, jitted.
  """
  import jax
  import jax.numpy as jnp
  import optax

  from vit_jax.models.resample import METHODS

  warmup = max(1, round(WARMUP * steps))

  def rate(step):
    return lr * jnp.minimum(1, step / warmup) * (1 - step / steps)

  tx = optax.adamw(rate, b1=0.9, b2=0.999, weight_decay=weight_decay)

  def start(seed):
    kernel = 0.01 * jax.random.normal(jax.random.key(seed), (width, classes))
    params = {
      "scale": jnp.ones(width),
      "bias": jnp.zeros(width),
      "kernel": kernel,
      "offset": jnp.zeros(classes),
    }
    statistics = {"mean": jnp.zeros(width), "variance": jnp.ones(width)}
    return params, statistics, tx.init(params)

  @functools.cache
  def of_size(grid, size):
    resize = [
      jnp.asarray(METHODS["linear"](old, new), jnp.float32)
      for old, new in zip(grid, size, strict=True)
    ]

    def loss_of(params, x, masks):
      mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
      wide = (None, None, None)
      x = (x - mean[wide]) * jax.lax.rsqrt(variance + BN_EPS)[wide]
      x = x * params["scale"][wide] + params["bias"][wide]
      logits = jnp.matmul(x, params["kernel"], precision="highest")
      logits += params["offset"][wide]
      logits = jnp.einsum(
        "hy,byxc,wx->bhwc", resize[0], logits, resize[1], precision="highest"
      )
      counts = masks != IGNORED
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(counts, masks, 0).astype(jnp.int32)
      )
      mean_loss = jnp.sum(losses * counts) / jnp.maximum(jnp.sum(counts), 1)
      num = x.size // x.shape[-1]
      unbiased = variance * (num / max(1, num - 1))
      return mean_loss, {"mean": mean, "variance": unbiased}

    @jax.jit
    def update(state, x, masks):
      params, statistics, opt_state = state
      grads, of_batch = jax.grad(loss_of, has_aux=True)(
        params, x.astype(jnp.float32), masks
      )
      updates, opt_state = tx.update(grads, opt_state, params)
      statistics = jax.tree.map(
        lambda old, new: old + BN_MOMENTUM * (new - old), statistics, of_batch
      )
      return optax.apply_updates(params, updates), statistics, opt_state

    return start, update

  return of_size


def predictions(logits: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Returns the class with the largest logit of each pixel, int64 [h, w].

  Args:
    logits: Floats [gh, gw, classes], which are resized bilinearly (as
      torch.nn.functional.interpolate does with align_corners=False).
    size: (h, w).

  Example:
    >>> predictions(np.array([[[0.0, 1.0], [1.0, 0.0]]]), (1, 4))
    array([[1, 1, 0, 0]])
  """
  from vit_jax.models.resample import METHODS

  of_rows, of_columns = (
    METHODS["linear"](old, new).astype(logits.dtype)
    for old, new in zip(logits.shape[:2], size, strict=True)
  )
  grid_h, grid_w, classes = logits.shape
  band = max(1, BAND // (size[1] * classes))
  parts = []
  for start in range(0, size[0], band):
    rows = of_rows[start : start + band] @ logits.reshape(grid_h, -1)
    pixels = of_columns @ rows.reshape(-1, grid_w, classes)
    parts.append(pixels.argmax(-1))
  return np.concatenate(parts)


def confusion(
  predicted: np.ndarray, target: np.ndarray, classes: int
) -> np.ndarray:
  """Returns the number of pixels by class and prediction, int64 [c, c].

  Args:
    predicted: Classes, int [h, w].
    target: Classes, or 255 for pixels that do not count, int [h, w].
    classes: Number c of classes.

  Example:
    >>> confusion(np.array([[0, 1, 1]]), np.array([[0, 0, 255]]), 2)
    array([[1, 1],
           [0, 0]])
  """
  counts = target != IGNORED
  pairs = target[counts].astype(np.int64) * classes + predicted[counts]
  return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def miou(matrix: np.ndarray) -> float:
  """Returns the mean IoU of the classes that occur; NaN if none does.

  Args:
    matrix: A result of `confusion`, or a sum of them.

  Example:
    >>> miou(np.array([[2, 2, 0], [0, 4, 0], [0, 0, 0]]))  # 2 / 4 and 4 / 6
    0.5833333333333333
  """
  union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
  occurs = union > 0
  if not occurs.any():
    return float("nan")
  return float(np.mean(matrix.diagonal()[occurs] / union[occurs]))


def _halves(number: int) -> dict[str, np.ndarray]:
  """Returns the parts of fake data."""
  numbers = np.arange(number)
  return {"train": numbers[: number // 2], "val": numbers[number // 2 :]}


def _order(number: int, seed: int) -> Iterator[int]:
  """Yields rows without end, a permutation in each epoch."""
  for epoch in itertools.count():
    rng = np.random.default_rng((seed, epoch))
    yield from rng.permutation(number).tolist()
