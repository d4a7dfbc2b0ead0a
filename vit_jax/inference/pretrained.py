"""Models that are ready to call: `vit = vit_jax.load(path)`."""

import dataclasses
import functools
import itertools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import class_names, sharding, weights
from vit_jax.batch import normalise
from vit_jax.config import ModelConfig, model_from_dict, to_dict
from vit_jax.config.preprocessing import (
  colour,
  decoding,
  for_channels,
  turns_upright,
  with_decoding,
)
from vit_jax.config.preprocessing import image_size as size_after
from vit_jax.data import images as images_lib
from vit_jax.data import pixels
from vit_jax.evaluators.features import (
  TOKENS,
  intermediate,
  joined,
  tokens_error,
)
from vit_jax.families import FAMILIES
from vit_jax.inference import streaming
from vit_jax.losses import HEADS, PROBABILITIES, REGRESSION
from vit_jax.models import build, inspection
from vit_jax.options import nearest
from vit_jax.weights import eval_preprocessing, normalisation
from vit_jax.writers import run_info

# Arguments of `load` that are no options of the model.
ARGUMENTS = (
  "image_size", "patch", "grid", "posemb_filter", "loss", "mean", "std",
  "background", "verbose",
)  # fmt: skip
BATCH = 16  # images in a forward pass
FLOATS = (
  "expected floats in [-1, 1]: images / 127.5 - 1, or vit.predict(images)."
)
# Values that filters leave beyond [-1, 1]; and those of images normalised by
# another mean and deviation, or of normal noise.
MOST, MOST_ODD = 1.5, 8.0
NO_IMAGES = "got no images, expected one or more."
PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu"})  # jax.export takes any


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A class and its probability by the model, 0 to 1.

  A class of ImageNet has its word and its wnid: "tench (n01440764)". `index` is
  its column of the head, since two classes may have one name.
  """

  name: str
  probability: float
  index: int


@dataclasses.dataclass(frozen=True)
class Value:
  """A number that a regression predicts, in the data's units.

  `index` is its output of the head.
  """

  name: str
  value: float
  index: int

  @property
  def probability(self) -> float:
    """None that could be returned.

    Raises:
      ValueError: A regression has no probabilities.
    """
    raise ValueError(
      f"{self.name}: got a question for its probability, but the head is a"
      f" regression: expected one for its value, {self.value:g}."
    )


@dataclasses.dataclass(frozen=True)
class Answer:
  """A model's answer for an image.

  Attributes:
    name: Path of the image, or a name.
    classes: The most probable first; of a regression its numbers, in the order
      of the outputs. Empty where the image cannot be read.
    pixels: uint8 [h, w, 3] as the model got them; None: it cannot be read.
    attention: Its `Pretrained.attention_map`, [rows, columns]; None: it was not
      asked for.
    error: Why the image cannot be read; None: it can.
  """

  name: str
  classes: list[Prediction] | list[Value]
  pixels: np.ndarray | None = None
  attention: np.ndarray | None = None
  error: Exception | None = None


class FeatureRow(NamedTuple):
  """The features of an image.

  name: Path of the image, or a name.
  features: A layer, float32; None: the image cannot be read.
  error: Why the image cannot be read; None: it can.
  """

  name: str
  features: np.ndarray | None
  error: Exception | None


@dataclasses.dataclass(frozen=True, repr=False)
class Pretrained:
  """A model with its weights, and everything that its use needs.

  Attributes:
    config: The model's options.
    params: Nested dict of arrays, float32.
    num_classes: Width of the head; 0: there is none.
    image_size: (height, width) of its images, pixels.
    class_names: Names in the order of the logits; None where they are unknown.
    ops: Preprocessing that makes its images, as in `config.data.ops`.
    loss: "softmax", "sigmoid", "bce" or "regression": the loss of the head's
      training. The outputs of a regression are numbers in the data's units.
    report: What was done with the weights.
  """

  config: ModelConfig
  params: dict[str, Any]
  num_classes: int
  image_size: tuple[int, int]
  class_names: tuple[str, ...] | None
  ops: str
  loss: str
  report: weights.Report

  def __repr__(self) -> str:
    """Returns a line: file, model, parameters, images, classes."""
    count, (height, width) = run_info.num_params(self.params), self.image_size
    return (
      f"<vit_jax model {self.config.variant} of {self.report.path}:"
      f" {count:,} parameters, images of {height} x {width},"
      f" {self.num_classes:,} classes>"
    )

  @property
  def image_shape(self) -> tuple[int, int, int]:
    """(height, width, channels) of its images."""
    return *self.image_size, self.config.channels

  @functools.cached_property
  def model(self) -> nn.Module:
    """The linen module; `model.apply({"params": params}, images)`."""
    return build(self.config, self.num_classes)

  @functools.cached_property
  def _apply(self) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    return jax.jit(lambda params, x: self.model.apply({"params": params}, x))

  @property
  def is_regression(self) -> bool:
    """Whether the head predicts numbers."""
    return self.loss == REGRESSION

  @functools.cached_property
  def probabilities(self) -> Callable[..., jax.Array]:
    """(params, images uint8 [b, h, w, 3]) -> probabilities, jitted.

    Of a regression the numbers.
    """

    def probabilities(params, images):
      def forward(images):
        return self.model.apply({"params": params}, normalise(images))[0]

      logits = sharding.few_at_a_time(forward, images, jax.devices()[:1])
      return logits if self.is_regression else PROBABILITIES[self.loss](logits)

    return jax.jit(probabilities)

  def __call__(
    self, images: Any
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Returns logits, and the intermediates by name; see the model.

    Args:
      images: Floats [b, h, w, 3] in [-1, 1], of `image_size`: an array of jax,
        or whatever numpy reads, such as a tensor of torch. A warning says that
        the values look like those of another range.

    Raises:
      ValueError: They are of another type or shape, or in 0 to 255.
    """
    return self._apply(self.params, self._checked(images))

  def predict(
    self, images: Any, top: int = 5
  ) -> list[list[Prediction]] | list[list[Value]]:
    """Classifies images, or predicts their numbers.

    The images get the model's own preprocessing.

    As in training, grey images become RGB, alpha is dropped, and EXIF
    orientations are applied. Pillow decodes and numpy resizes
    (`vit_jax.data.pixels`). From lossless files, and from arrays, the model
    gets the pixels of evaluation (with antialiasing, 1 in 1,000 differs by 1
    level of 255). From JPEG files, TensorFlow's decoder gives pixels that
    differ by 1 level in the mean, and by at most 18 on photographs.

    Args:
      images: A path, a glob, the bytes of a file, a file that is open in
        binary, a PIL image, or an array uint8 [h, w], [h, w, 1], [h, w, 3] or
        [h, w, 4]; or any number of these in a list, or as an array
        [b, h, w, c]. Files of `vit_jax.data.images.FORMATS`.
      top: Number of classes returned for each image; a regression returns all
        its numbers.

    Returns:
      One list per image, in the order of `images` (for a glob: of the names),
      the most probable class first. Probabilities are the softmax of the
      logits, or, if the model was trained with another `loss`, each logit's
      own sigmoid, which do not sum to 1. A class without a name is given by its
      number. Of a regression, all numbers in the order of its outputs.

    Raises:
      FileNotFoundError: A glob matches nothing; or images cannot be read, all
        of them as their files are missing.
      ValueError: The model has no head, or `top` is no number from 1; or some
        images cannot be read for other reasons, too. The messages name the
        first ten.
    """
    images = images_lib.listed(images)
    named = (
      streaming.Named(images_lib.name(image, i), image)
      for i, image in enumerate(images)
    )
    classes, errors = [], []
    for answer in self.predictions(named, top, batch_size=BATCH):
      classes.append(answer.classes)
      if (e := answer.error) is not None:
        errors.append((f"{answer.name}: {e}", type(e)))
    if errors:
      raise _joined(errors, len(images))
    return classes

  def features(
    self, images: Any, layer: str = "pre_logits"
  ) -> Float[np.ndarray, "b ..."]:
    """Returns features of images: what the head reads, or another layer.

    Sixteen images pass at a time.

    Args:
      images: See `attention`.
      layer: A name among those of the intermediates that a call of the model
        returns: "pre_logits" [b, d]; "encoded", the tokens behind the last
        norm; "encoderblock_3/after_mlp", those behind the fourth block. Tokens
        [b, n, d] are not averaged; the class token, if any, is the first. Or
        "cls+patches", the class token beside the mean of the patches, and so on
        (`vit_jax.evaluators.features`).

    Returns:
      The layer, float32.

    Raises:
      ValueError: There is no such layer; or an image cannot be read.

    Example:
      >>> x = vit.features("photos/*.jpg")  # doctest: +SKIP
      >>> tokens = vit.features(images, "encoded")  # doctest: +SKIP
    """
    images = self._inputs(images)
    parts = [
      self._layer(self.params, images[i : i + BATCH], layer)
      for i in range(0, len(images), BATCH)
    ]
    return np.concatenate([np.asarray(p, np.float32) for p in parts])

  def feature_rows(
    self,
    images: Iterable[streaming.Named],
    layer: str = "pre_logits",
    *,
    batch_size: int = BATCH,
  ) -> Iterator[FeatureRow]:
    """Yields features of any number of images, in their order.

    See `predictions` for what is in memory, and `features` for the layer.

    Args:
      images: Images with names; `streaming.find` finds those of a folder.
      layer: Name of an intermediate.
      batch_size: Images in a forward pass.

    Raises:
      ValueError: There is no such layer.
    """

    def compute(images):
      return self._layer(self.params, normalise(images), layer)

    for batch, result in self._computed(images, batch_size, compute):
      values = iter(
        np.asarray(result, np.float32) if result is not None else ()
      )
      for row in batch:
        is_read = row.error is None
        yield FeatureRow(row.name, next(values) if is_read else None, row.error)

  def forward_features(self, images: Any) -> Float[np.ndarray, "b ..."]:
    """Returns the encoded tokens [b, n, d], timm's method of that name.

    The class token, if any, is the first; a ResNet has a map [b, h, w, d].

    Args:
      images: See `attention`.

    Raises:
      ValueError: An image cannot be read.
    """
    return self.features(images, "encoded")

  @functools.cached_property
  def _layer(self) -> Callable[..., jax.Array]:
    def layer_of(params, images, layer):
      is_tokens = TOKENS.fullmatch(layer)
      if is_tokens and (error := tokens_error(layer, self.config)):
        raise ValueError(f"layer: {error}")

      def forward(images):
        _, out = self.model.apply({"params": params}, images)
        if is_tokens:
          return joined(out, params, self.config, (layer,))
        return intermediate(out, layer)

      return sharding.few_at_a_time(forward, images, jax.devices()[:1])

    return jax.jit(layer_of, static_argnums=2)

  def attention(self, images: Any) -> Float[Array, "layers b heads n n"]:
    """Returns the attention weights of every block, float32.

    See `vit_jax.models.inspection.attention_of`. All are in memory at once: 192
    MB an image for B/16 at 384 px.

    Args:
      images: Floats in [-1, 1], of `image_size`, as the model itself takes; or
        whatever `predict` takes, which gets the model's own preprocessing.

    Raises:
      ValueError: The model has no attention, or an image cannot be read.
    """
    images = self._inputs(images)
    return inspection.attention_of(self.config, self.params, images)

  def attention_map(self, images: Any) -> Float[np.ndarray, "b gh gw"]:
    """Returns the attention of the answer to each patch, by rollout.

    See `vit_jax.models.inspection.attention_map`. Each map sums to 1.
    `vit_jax.inference.overlay.beside` draws it beside its image.

    Args:
      images: See `attention`.

    Raises:
      ValueError: The model has no attention, or an image cannot be read.
    """
    images = self._inputs(images)
    rows = inspection.batch_size(self.config, self.image_size)
    maps = [
      inspection.attention_map(self.config, self.params, images[i : i + rows])
      for i in range(0, len(images), rows)
    ]
    return np.concatenate(maps)

  def _inputs(self, images) -> inspection.Images:
    """Returns floats as they are, and other images preprocessed."""
    if hasattr(images, "dtype") and _is_float(images := _array(images)):
      images = self._checked(images)
      if not len(images):
        raise ValueError(NO_IMAGES)
      return images
    options = decoding(self.ops)
    read = (images_lib.read(i, **options) for i in images_lib.listed(images))
    ops = for_channels(self.ops, self.config.channels)
    rows = [pixels.apply(image, ops) for image in read]
    if not rows:
      raise ValueError(NO_IMAGES)
    return normalise(np.stack(rows))

  def _checked(self, images: Any) -> inspection.Images:
    """Returns images as the model takes them, or raises ValueError."""
    images = _array(images)
    shape, (height, width, channels) = images.shape, self.image_shape
    if len(shape) != 4 or shape[1:] != self.image_shape:
      hint = "for another size, vit_jax.load(path, image_size=(height, width))."
      if shape[1:] == (channels, height, width):
        hint = "channels are last: images.transpose(0, 2, 3, 1)."
      elif shape == self.image_shape:
        hint = "one image is a batch, too: image[None]."
      raise ValueError(
        f"got images of shape {shape}, expected [b, {height}, {width},"
        f" {channels}]; {hint}"
      )
    if not _is_float(images):
      raise ValueError(f"got images of type {images.dtype}, {FLOATS}")
    _check_range(images)
    return images

  def predictions(
    self,
    images: Iterable[streaming.Named],
    top: int = 5,
    *,
    batch_size: int = BATCH,
    attention: bool = False,
  ) -> Iterator[Answer]:
    """Classifies any number of images, in their order.

    While the model computes, threads decode and resize the next two batches;
    more are not in memory. One batch shape is compiled: the last batch is
    filled up. A single batch that is not full is filled up to a power of two.

    Args:
      images: Images with names; `streaming.find` finds those of a folder.
      top: Number of classes of each.
      batch_size: Images in a forward pass.
      attention: Whether attention maps are wanted, too.

    Raises:
      ValueError: The model has no head; `top` or `batch_size` is no number
        from 1; or attention is wanted, and it has none.
    """
    for name, value in (("top", top), ("batch_size", batch_size)):
      if value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a number from 1.")
    if not self.num_classes:
      raise ValueError("got a model without a head, expected one; call it.")
    if attention:  # raises if the model has none
      inspection.batch_size(self.config, self.image_size)
    return self._answers(images, top, batch_size, attention)

  def _answers(
    self,
    images: Iterable[streaming.Named],
    top: int,
    batch_size: int,
    attention: bool,
  ) -> Iterator[Answer]:
    names = self.class_names or map(str, range(self.num_classes))
    names = [class_names.readable(name) for name in names]
    answer = functools.partial(
      _values if self.is_regression else _most_probable, names=names, top=top
    )

    def compute(images):
      maps = self.attention_map(normalise(images)) if attention else None
      return self.probabilities(self.params, images), maps

    for batch, result in self._computed(images, batch_size, compute):
      yield from _batch_answers(batch, *(result or (None, None)), answer)

  def _computed(
    self,
    images: Iterable[streaming.Named],
    batch_size: int,
    compute: Callable[[np.ndarray], Any],
  ) -> Iterator[tuple[list[streaming.Row], Any]]:
    """Yields batches, and what the device computes of their readable images.

    The device computes a batch while the next one is read.

    Args:
      images: Images with names.
      batch_size: Readable images of a batch; the last has fewer.
      compute: Maps images uint8 [batch_size, h, w, c], filled up with zeros, to
        what is yielded, without a wait for the device. None is yielded for a
        batch of which no image can be read.
    """
    ops = for_channels(self.ops, self.config.channels)
    rows = streaming.read_all(images, ops, ahead=2 * batch_size)
    running = None
    for batch in _batches(rows, batch_size):
      readable = [row.pixels for row in batch if row.error is None]
      if running is None and len(readable) < batch_size:  # the only batch
        batch_size = 1 << max(len(readable) - 1, 0).bit_length()
      result = None
      if readable:
        images = np.zeros((batch_size, *self.image_shape), np.uint8)
        images[: len(readable)] = readable
        result = compute(images)
      if running is not None:
        yield running
      running = batch, result
    if running is not None:
      yield running

  def metadata(self) -> dict[str, Any]:
    """Returns the JSON that goes with the parameters."""
    return {
      "model": to_dict(self.config),
      "image_size": list(self.image_size),
      "grid": list(self.config.grid(self.image_size)),
      "has_cls_row": self.config.has_cls_row,
      "preprocessing": {"ops": self.ops, "value_range": [-1.0, 1.0]},
      "num_classes": self.num_classes,
      "class_names": list(self.class_names) if self.class_names else None,
      "loss": self.loss,
      "num_params": run_info.num_params(self.params),
      "step": 0,
      "source": self.report.path,
      "versions": run_info.versions(),
    }

  def export(self, platforms: str | Sequence[str] = ("cpu",)) -> bytes:
    """Returns the forward pass as StableHLO, weights included.

    `jax.export.deserialize(...).call(images)` runs it without this package, on
    1 or more images float32 [b, height, width, 3] in [-1, 1], and returns
    the logits.

    Args:
      platforms: One or several to run on: "cpu", "cuda", "rocm", "tpu".

    Raises:
      ValueError: There is no such platform.
    """
    if isinstance(platforms, str):
      platforms = (platforms,)
    if not platforms or not PLATFORMS.issuperset(platforms):
      raise ValueError(
        f"platforms: got {platforms!r}, expected one or more of"
        f" {', '.join(sorted(PLATFORMS))}."
      )
    (rows,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((rows, *self.image_shape), jnp.float32)
    logits = jax.jit(lambda x: self.model.apply({"params": self.params}, x)[0])
    exported = jax.export.export(logits, platforms=platforms)(images)
    return bytes(exported.serialize())


def load(
  path: str | os.PathLike,
  *,
  image_size: int | tuple[int, int] | None = None,
  patch: int | None = None,
  grid: int | tuple[int, int] | None = None,
  posemb_filter: str | None = None,
  loss: str | None = None,
  mean: normalisation.Statement = None,
  std: normalisation.Statement = None,
  background: str | None = None,
  verbose: bool = True,
  **options,
) -> Pretrained:
  """Loads a model with its weights from any known format.

  The format is recognised by the content of the file: `.npz` of Google's ViT,
  AugReg, BiT or big_vision; `.safetensors` or `.pth` of timm, Meta (DeiT,
  DINOv2, DINOv3, MAE) or OpenCLIP; the folder of a Hugging Face model or of an
  adapter of peft; the folder of one of our runs, of one step, or of a plain
  tree of arrays saved with Orbax. The model is known by the parameters' names
  and shapes; no code of a file is run.

  Args:
    path: A path on disk, or wherever the file layer reads (gs://); or what is
      downloaded: https://..., hf-hub:OWNER/NAME[@REV].
    image_size: (height, width) or the side of a square, pixels; None: that of
      the weights' training. Positions are resampled.
    patch: Side of a patch, pixels; None: the weights'. The patch embedding is
      resized by the pseudoinverse of arXiv:2212.08013.
    grid: Rows and columns of patches of the position table, for a file that
      does not state them and whose grid is not square.
    posemb_filter: How positions are resampled: "zoom" (the paper's), or another
      of `vit_jax.models.resample.METHODS`. None: "zoom" for ViT, and for later
      models as the library of the file does.
    loss: Loss of the head's training, which decides the probabilities of
      `predict`: "softmax", "sigmoid" or "bce" (a sigmoid, too), or
      "regression", which predicts numbers. None: the loss that our run or
      Hugging Face's config.json states; if none is stated, sigmoid for the
      21,843 classes of Google's ImageNet-21k files, and softmax for all others.
      That is wrong for other heads trained with a sigmoid, such
      as AugReg's from ImageNet-1k alone, whose files do not state it.
    mean, std: How the images of its training were normalised, for a file that
      does not state it: mean="imagenet" (DINO, MAE, DeiT), "clip" or "half"
      (Google's, [-1, 1]), which stand for both; or one number or three of
      pixels in [0, 1] for each of the two: images in [0, 1] are mean=0, std=1,
      images in [0, 255] mean=0, std=1/255. None: as the file states, or else
      "half", with a note. It becomes part of the patch embedding: the model
      gets images in [-1, 1] in any case.
    background: Colour behind transparent images: "white", "black", "#ff8800".
      None: that of the file, or else white where nothing is visible, and
      colours without alpha elsewhere.
    verbose: Whether to print the result's `report`: a table of what was loaded,
      resized, re-initialised and ignored.
    **options: Options of the model that replace the file's, such as
      dtype="bfloat16", gelu="erf", num_heads=3; or channels=1, which folds the
      patch embedding: the model then takes grey images.

  Raises:
    FileNotFoundError: Nothing is there.
    ValueError: The file is damaged, unsafe or unknown, or not a whole model; or
      an argument is unknown or of another type.

  Example:
    >>> import vit_jax
    >>> vit = vit_jax.load("B_16.npz", image_size=384)  # doctest: +SKIP
    >>> vit.predict("cat.jpg", top=1)[0][0].name  # doctest: +SKIP
    'tiger cat (n02123159)'
    >>> features = vit.features("photos/*.jpg")  # doctest: +SKIP
    >>> logits, out = vit(images)  # floats in [-1, 1]  # doctest: +SKIP
  """
  if loss not in (None, *HEADS):
    raise ValueError(f"loss: got {loss!r}, expected one of {', '.join(HEADS)}.")
  if background is not None:
    colour(background)  # raises ValueError
  options = _checked_options(options)
  size = pair("image_size", image_size, "pixels: 224, or (height, width)")
  grid = pair("grid", grid, "patches: 14, or (rows, columns)")
  file = weights.read(path, grid=grid, options=options, mean=mean, std=std)
  try:
    config = weights.identify(file.params, {**file.options, **options})
    height, width = size or weights.trained_at(file)
    ops, notes = preprocessing(file, (height, width))
    ops = with_decoding(ops, background=background)
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  config = dataclasses.replace(config.for_inference(), **options)
  if patch is not None:
    config = config.with_patch(patch)
  num_classes = weights.num_classes(file.params)
  model = build(config, num_classes)
  target = jax.eval_shape(
    model.init,
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, height, width, config.channels), jnp.float32),
  )["params"]
  params, report = weights.adapt(
    dataclasses.replace(file, notes=(*file.notes, *notes)),
    target,
    config,
    (height, width),
    posemb_filter=posemb_filter,
    resize_patch=patch is not None,
    stated=options | ({"grid": grid} if grid else {}),
  )
  if verbose:
    print(weights.format_report(report))
  if report.reinitialised:
    parts = {k: file.params.get(k) for k in report.reinitialised}
    raise ValueError(
      f"{path}: got a head whose parts do not belong together: "
      + ", ".join(
        f"{k} {'missing' if v is None else f'of shape {v.shape}'}"
        for k, v in parts.items()
      )
      + f"; expected {num_classes:,} classes in all. Take a whole file."
    )
  return Pretrained(
    config=config,
    params=_to_device(params),
    num_classes=num_classes,
    image_size=(height, width),
    class_names=file.class_names,
    # Images of other channels than files have are given as arrays.
    ops=for_channels(ops, config.channels) if config.channels == 1 else ops,
    loss=loss or file.loss or "softmax",
    report=report,
  )


def preprocessing(
  file: weights.Weights, size: tuple[int, int]
) -> tuple[str, tuple[str, ...]]:
  """Returns the operations that make images of a size for a file; and notes.

  They are the file's own; for another size, with the same filter and the same
  share of the image. If the file states none, or none has a form for the size,
  the whole image is resized, as in Google's evaluation.
  """
  ops, whole = file.ops, eval_preprocessing.google(size).ops
  if ops is not None:
    whole = _decoded_as(ops, whole)
  if ops is None or pixels.is_random(ops):  # from a run without evaluation
    return whole, ()
  if size_after(ops) == size:
    return ops, ()
  if text := eval_preprocessing.whole_and_centre(ops, size):
    return text, ()
  if path := eval_preprocessing.taken_apart(ops):
    new = path.at(size)
    if file.crop_share and new.short:  # `path` has it rounded
      new = new.cropped(file.crop_share)
    whole = _decoded_as(ops, new.ops)
    if (new.short is None) == (path.short is None):
      return whole, ()
  return whole, (
    f"preprocessing is {whole}: that of the weights, {ops}, has no form for"
    f" images of {size[0]} x {size[1]} pixels.",
  )


def _decoded_as(ops: str, other: str) -> str:
  """Returns the other operations, which decode as the first ones."""
  if not turns_upright(ops):
    other = eval_preprocessing.as_stored(other)
  options = decoding(ops)
  del options["exif"]
  return with_decoding(other, **options)


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
  """Returns options of a model, converted to the types of their fields.

  Raises:
    ValueError: No family has all of these options, or a value has another type.
  """
  fields = {
    name: [f.name for f in dataclasses.fields(cls)]
    for name, cls in FAMILIES.items()
  }
  known = dict.fromkeys(k for names in fields.values() for k in names)
  if unknown := sorted(options.keys() - known.keys()):
    near = "".join(nearest(key, [*ARGUMENTS, *known]) for key in unknown)
    raise ValueError(
      f"load: got {', '.join(unknown)}, expected {', '.join(ARGUMENTS)}, or"
      f" options of the model: {', '.join(known)}.{near}"
    )
  name = next((n for n, f in fields.items() if options.keys() <= {*f}), None)
  if name is None:
    raise ValueError(
      f"load: got {', '.join(sorted(options))}, which no family of models has"
      " together; see vit-jax train --help."
    )
  checked = model_from_dict({"name": name, **options})
  return {key: getattr(checked, key) for key in options}


def pair(name: str, value: Any, expected: str) -> tuple[int, int] | None:
  """Returns two whole numbers from 1; one number stands for two equal ones.

  Raises:
    ValueError: The value is anything else, except None.
  """
  if value is None:
    return None
  try:
    first, second = (value, value) if np.ndim(value) == 0 else value
    sides = operator.index(first), operator.index(second)
  except (TypeError, ValueError):
    sides = (0, 0)
  if min(sides) < 1:
    raise ValueError(f"{name}: got {value!r}, expected {expected}.")
  return sides


def _array(images: Any) -> np.ndarray | jax.Array:
  """Returns images as an array; jax's stay where they are."""
  return images if isinstance(images, jax.Array) else images_lib.array(images)


def _is_float(images: np.ndarray | jax.Array) -> bool:
  return jnp.issubdtype(images.dtype, jnp.floating)


def _check_range(images: np.ndarray | jax.Array) -> None:
  """Refuses floats in 0 to 255, and warns of other ranges than [-1, 1].

  Values that are not finite have no effect. A batch of images that is never
  below 0 but has contrast is one in [0, 1].
  """
  if isinstance(images, jax.core.Tracer) or not images.size:
    return
  if isinstance(images, jax.Array):
    low, high = float(jnp.nanmin(images)), float(jnp.nanmax(images))
  else:  # without numpy's warning where nothing is a number
    low, high = (float(f.reduce(images, axis=None)) for f in (np.fmin, np.fmax))
  got = f"got images with values from {low:.3g} to {high:.3g}"
  if MOST_ODD < high < np.inf:
    raise ValueError(f"{got}, {FLOATS}")
  if 0 <= low < 0.5 < high <= 1:
    warnings.warn(
      f"{got}, expected floats in [-1, 1]: 2 * images - 1 if they are in"
      " [0, 1].",
      stacklevel=4,
    )
  elif max(-low, high) > MOST:
    warnings.warn(
      f"{got}, expected floats in [-1, 1], whatever mean and deviation the"
      " model was trained with: its first layer has them.",
      stacklevel=4,
    )


def _batches(
  rows: Iterable[streaming.Row], size: int
) -> Iterator[list[streaming.Row]]:
  """Yields lists with `size` readable images each; the last may have fewer."""
  batch, count = [], 0
  for row in rows:
    batch.append(row)
    count += row.error is None
    if count == size:
      yield batch
      batch, count = [], 0
  if batch:
    yield batch


def _batch_answers(
  batch: list[streaming.Row],
  probabilities: Float[Array, "b classes"] | None,
  maps: Float[np.ndarray, "b gh gw"] | None,
  answer: Callable[[np.ndarray], list],
) -> Iterator[Answer]:
  """Yields an answer for each image; unreadable ones have no probabilities."""
  probabilities = np.asarray(probabilities)  # waits for the device
  numbers = itertools.count()
  for row in batch:
    if row.error is not None:
      yield Answer(row.name, [], error=row.error)
      continue
    i = next(numbers)
    yield Answer(
      row.name,
      answer(probabilities[i]),
      row.pixels,
      None if maps is None else maps[i],
    )


def _most_probable(
  probabilities: np.ndarray, names: Sequence[str], top: int
) -> list[Prediction]:
  best = np.argsort(-probabilities, kind="stable")[:top].tolist()
  return [Prediction(names[k], float(probabilities[k]), k) for k in best]


def _values(numbers: np.ndarray, names: Sequence[str], top: int) -> list[Value]:
  del top  # all are of interest
  return [Value(names[k], float(v), k) for k, v in enumerate(numbers)]


def _to_device(tree: dict[str, Any]) -> dict[str, Any]:
  """Moves arrays to the device, releasing each at once: few exist twice."""
  return {
    key: _to_device(value) if isinstance(value, dict) else jax.device_put(value)
    for key, value in ((k, tree.pop(k)) for k in list(tree))
  }


def _joined(errors: list[tuple[str, type]], total: int) -> Exception:
  """Returns one error for all images that cannot be read."""
  texts, kinds = zip(*errors, strict=True)
  kind = FileNotFoundError if set(kinds) == {FileNotFoundError} else ValueError
  if len(texts) == 1:
    return kind(texts[0])
  lines = "".join(f"\n  - {text}" for text in texts[:10])
  if (more := len(texts) - 10) > 0:
    lines += f"\n  - and {more:,} more"
  return kind(f"{len(texts)} of {total:,} images cannot be read:{lines}")
