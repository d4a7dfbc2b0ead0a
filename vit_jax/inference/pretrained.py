"""Models that are ready to use: `vit = vit_jax.load(path)`."""

import dataclasses
import functools
import itertools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from vit_jax import class_names, microbatch, names, weights
from vit_jax.batch import normalise
from vit_jax.config import ModelConfig, model_from_dict, to_dict
from vit_jax.data import images as images_lib
from vit_jax.data import pixels
from vit_jax.data.operation import colour
from vit_jax.data.preprocessing import (
  decoding,
  for_channels,
  with_decoding,
)
from vit_jax.data.preprocessing import image_size as size_after
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
from vit_jax.models.variables import only_params
from vit_jax.options import nearest, unexpected
from vit_jax.weights import assumptions, eval_preprocessing, normalisation
from vit_jax.writers import run_info

if TYPE_CHECKING:
  from flax import nnx

# Arguments of `load` that are not options of the model.
ARGUMENTS = (
  "num_classes", "image_size", "patch", "grid", "posemb_filter", "loss", "mean",
  "std", "background", "verbose",
)  # fmt: skip
BATCH = 16  # images in a forward pass
FLOATS = (
  "expected floats in [-1, 1]: images / 127.5 - 1, or vit.predict(images)"
)
# Resizing filters may leave values up to MOST. Normal noise and images that are
# normalised by other statistics have values up to MOST_ODD.
MOST, MOST_ODD = 1.5, 8.0
NO_IMAGES = "got no images, expected one or more."
# Checked here, because jax.export accepts any name.
PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu"})


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A predicted class.

  Attributes:
    name: Name of the class. A class of ImageNet has its word and its wnid:
      "tench (n01440764)".
    probability: Probability of the class, 0 to 1.
    index: Column of the head; two classes may have the same name.
  """

  name: str
  probability: float
  index: int


@dataclasses.dataclass(frozen=True)
class Value:
  """A predicted number of a regression.

  Attributes:
    name: Name of the number.
    value: The number, in the units of the data.
    index: Output of the head.
  """

  name: str
  value: float
  index: int


@dataclasses.dataclass(frozen=True)
class Answer:
  """The predictions for an image.

  Attributes:
    name: Path of the image, or another name.
    classes: Predicted classes, the most probable first; for a regression the
      numbers, in the order of the outputs. Empty if the image cannot be read.
    pixels: The pixels that the model got, uint8 [h, w, 3]; None if the image
      cannot be read.
    attention: The `Pretrained.attention_map` of the image, [gh, gw]; None if it
      was not requested.
    error: The error of reading the image; None: there was none.
  """

  name: str
  classes: list[Prediction] | list[Value]
  pixels: np.ndarray | None = None
  attention: np.ndarray | None = None
  error: Exception | None = None


class FeatureRow(NamedTuple):
  """The features of an image.

  name: Path of the image, or another name.
  features: A layer, float32; None if the image cannot be read.
  error: The error of reading the image; None: there was none.
  """

  name: str
  features: np.ndarray | None
  error: Exception | None


@dataclasses.dataclass(frozen=True, repr=False)
class Pretrained:
  """A model with its weights, preprocessing and class names.

  Attributes:
    config: Options of the model.
    params: Parameters, a nested dict of float32 arrays.
    num_classes: Number of outputs of the head; 0: there is no head.
    image_size: (height, width) of the images, pixels.
    class_names: Names in the order of the logits; None if they are unknown.
    ops: Preprocessing of the images, in the language of `config.data.ops`.
    loss: Loss with which the head was trained: "softmax", "sigmoid", "bce" or
      "regression". The outputs of a regression are in the units of the data.
    report: Which weights were loaded, resized, re-initialised or ignored.
    posemb_filter: How positions are resized, a name of
      `models.resample.METHODS`.
  """

  config: ModelConfig
  params: dict[str, Any]
  num_classes: int
  image_size: tuple[int, int]
  class_names: tuple[str, ...] | None
  ops: str
  loss: str
  report: weights.Report
  posemb_filter: str = "zoom"

  def __repr__(self) -> str:
    """Returns a line with file, model, parameters, image size and outputs."""
    count, (height, width) = run_info.num_params(self.params), self.image_size
    numbers = "number" if self.num_classes == 1 else "numbers"
    what = numbers if self.is_regression else "classes"
    return (
      f"<vit_jax model {self.config.variant} of {self.report.path}:"
      f" {count:,} parameters, images of {height} x {width},"
      f" {self.num_classes:,} {what}>"
    )

  @property
  def image_shape(self) -> tuple[int, int, int]:
    """(height, width, channels) of an image."""
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
    """Jitted (params, images) -> probabilities, float [b, classes].

    Images are uint8 [b, h, w, channels]. For a regression the outputs are
    numbers instead of probabilities.
    """

    def probabilities(params, images):
      def forward(images):
        return self.model.apply({"params": params}, normalise(images))[0]

      logits = microbatch.few_at_a_time(forward, images, jax.devices()[:1])
      return logits if self.is_regression else PROBABILITIES[self.loss](logits)

    return jax.jit(probabilities)

  def __call__(
    self, images: Any
  ) -> tuple[Float[Array, "b classes"], dict[str, Any]]:
    """Returns the logits, and a dict of the model's intermediates.

    A warning is given if the values look like another range than [-1, 1].

    Args:
      images: Floats [b, h, w, channels] in [-1, 1] of shape `image_shape`: an
        array of jax or numpy, or a tensor of torch.

    Raises:
      ValueError: The images have another type or shape, or the range 0 to 255.
    """
    return self._apply(self.params, self._checked(images))

  def predict(
    self, images: Any, top: int = 5
  ) -> list[list[Prediction]] | list[list[Value]]:
    """Classifies images, or predicts their numbers.

    The images are preprocessed with `ops`. As in training, grey images become
    RGB, alpha is dropped, and EXIF orientations are applied. Pillow decodes and
    numpy resizes (`vit_jax.data.pixels`). For lossless files and arrays, the
    pixels are those of the evaluators (with antialiasing, 1 in 1,000 differs by
    1 level of 255). For JPEG files, they differ from TensorFlow's decoder by 1
    level in the mean, and by at most 18 on photographs.

    Args:
      images: A path, a glob, the bytes of a file, an open binary file, a PIL
        image, or an array uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]; a
        list of these; or an array [b, h, w, c]. File formats:
        `vit_jax.data.images.FORMATS`.
      top: Number of classes per image; a regression returns all its numbers.

    Returns:
      One list per image, in the order of `images` (a glob: by name), with the
      most probable class first. Probabilities are the softmax of the logits;
      for the losses "sigmoid" and "bce", they are the sigmoid of each logit,
      and do not sum to 1. A class without a name has its number as name. For a
      regression, the list has all numbers in the order of the outputs.

    Raises:
      FileNotFoundError: A glob matches nothing, or files are missing.
      ValueError: The model has no head; `top` is less than 1; or images cannot
        be read for other reasons. The message names the first ten images.
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
    """Returns features of images: the input of the head, or another layer.

    The images pass through the model in batches of 16.

    Args:
      images: See `attention`.
      layer: Name of an intermediate: "pre_logits" [b, d]; "encoded", the tokens
        after the final norm; "encoderblock_3/after_mlp", the tokens after the
        fourth block. Tokens [b, n, d] are not averaged; the class token, if
        any, is the first. Or a layer of `vit_jax.evaluators.features`, such as
        "cls+patches".

    Returns:
      The layer, float32.

    Raises:
      ValueError: There is no such layer, or an image cannot be read.

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

    The use of memory is that of `predictions`.

    Args:
      images: Images with names; `streaming.find` finds the images of a folder.
      layer: See `features`.
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
    """Returns the encoded tokens [b, n, d], as timm's method of this name.

    The class token, if any, is the first. A ResNet returns a map [b, h, w, d].

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

      return microbatch.few_at_a_time(forward, images, jax.devices()[:1])

    return jax.jit(layer_of, static_argnums=2)

  def attention(self, images: Any) -> Float[Array, "layers b heads n n"]:
    """Returns the attention weights of all blocks, float32.

    See `vit_jax.models.inspection.attention_of`. All weights are in memory at
    once: 192 MB per image for B/16 at 384 px.

    Args:
      images: Floats in [-1, 1] of `image_shape`, which are not preprocessed; or
        images as for `predict`, which are.

    Raises:
      ValueError: The model has no attention, or an image cannot be read.
    """
    images = self._inputs(images)
    return inspection.attention_of(self.config, self.params, images)

  def attention_map(self, images: Any) -> Float[np.ndarray, "b gh gw"]:
    """Returns the attention of the output to each patch, by rollout.

    See `vit_jax.models.inspection.attention_map`. Each map sums to 1.
    `vit_jax.inference.overlay.beside` draws an image beside its map.

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
    """Returns floats unchanged, and other images preprocessed."""
    if hasattr(images, "dtype") and _is_float(_array(images)):
      images = self._checked(images)
      if not len(images):
        raise ValueError(NO_IMAGES)
      return images
    images, options = images_lib.listed(images), decoding(self.ops)
    ops = for_channels(self.ops, self.config.channels)
    rows, errors = [], []
    for i, image in enumerate(images):
      try:
        rows.append(pixels.apply(images_lib.read(image, **options), ops))
      except (FileNotFoundError, ValueError) as e:
        errors.append((f"{images_lib.name(image, i)}: {e}", type(e)))
    if errors:
      raise _joined(errors, len(images))
    if not rows:
      raise ValueError(NO_IMAGES)
    return normalise(np.stack(rows))

  def _checked(self, images: Any) -> inspection.Images:
    """Returns the images as an array; checks type, shape and range."""
    images = _array(images)
    if images.shape[1:] != self.image_shape or images.ndim != 4:
      height, width, channels = self.image_shape
      expected = f"[b, {height}, {width}, {channels}]"
      raise ValueError(unexpected("images.shape", images.shape, expected))
    if not _is_float(images):
      raise ValueError(f"got images of type {images.dtype}, {FLOATS}.")
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

    While the model computes, threads decode and resize the next two batches.
    Further images are not in memory. One batch shape is compiled: the last
    batch is padded. If there is only one batch, it is padded to a power of two.

    Args:
      images: Images with names; `streaming.find` finds the images of a folder.
      top: Number of classes per image.
      batch_size: Images in a forward pass.
      attention: Whether to compute attention maps, too.

    Raises:
      ValueError: The model has no head; `top` or `batch_size` is less than 1;
        or `attention` is set, and the model has no attention.
    """
    for name, value in (("top", top), ("batch_size", batch_size)):
      if value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a number from 1.")
    if not self.num_classes:
      raise ValueError("got a model without a head; use features(images).")
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
    answer = functools.partial(_most_probable, names=names, top=top)
    if self.is_regression:  # all numbers are returned
      answer = functools.partial(_values, names=names)

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
    """Yields batches, and the results for their readable images.

    The device computes a batch while the next one is read. The result is None
    for a batch without a readable image.

    Args:
      images: Images with names.
      batch_size: Readable images per batch; the last batch has fewer.
      compute: Maps images uint8 [batch_size, h, w, c], padded with zeros, to
        results, without waiting for the device.
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

  def nnx(self) -> "nnx.Module":
    """Returns the model with its weights as a module of Flax NNX.

    Its call maps images as `model` does: floats [b, h, w, channels] in [-1, 1]
    to logits and a dict of intermediates, without the checks of `__call__`. Its
    parameters are `nnx.Param`s with the names of `params`, whose arrays they
    share.

    Example:
      >>> module = vit.nnx()  # doctest: +SKIP
      >>> logits, out = module(images)  # doctest: +SKIP
    """
    from flax import nnx

    def make():
      module = nnx.bridge.ToNNX(self.model)
      images = jnp.zeros((1, *self.image_shape))
      return module.lazy_init(images, rngs=jax.random.key(0))

    module = nnx.eval_shape(make)  # computing initial values takes seconds
    nnx.update(module, self.params)
    return module

  def metadata(self) -> dict[str, Any]:
    """Returns the metadata of the parameters, as JSON values."""
    return {
      "model": to_dict(self.config),
      "image_size": list(self.image_size),
      "grid": list(self.config.grid(self.image_size)),
      "has_cls_row": self.config.has_cls_row,
      "posemb_filter": self.posemb_filter,
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
    """Returns the forward pass with its weights as StableHLO.

    `jax.export.deserialize(...).call(images)` runs it without this package. It
    maps images, float32 [b, height, width, channels] in [-1, 1], to logits.

    Args:
      platforms: Platforms on which it runs: "cpu", "cuda", "rocm", "tpu".

    Raises:
      ValueError: A platform is unknown.
    """
    if isinstance(platforms, str):
      platforms = (platforms,)
    if not platforms or not PLATFORMS.issuperset(platforms):
      expected = f"one or more of {', '.join(sorted(PLATFORMS))}"
      raise ValueError(unexpected("platforms", platforms, expected))
    (rows,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((rows, *self.image_shape), jnp.float32)
    logits = jax.jit(lambda x: self.model.apply({"params": self.params}, x)[0])
    exported = jax.export.export(logits, platforms=platforms)(images)
    return bytes(exported.serialize())


def load(
  path: str | os.PathLike,
  *,
  num_classes: int | None = None,
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

  The format is recognised by the content: `.npz` of Google's ViT, AugReg, BiT
  or big_vision; `.safetensors` or `.pth` of timm, Meta (DeiT, DINOv2, DINOv3,
  MAE) or OpenCLIP; the folder of a Hugging Face model or of a peft adapter; the
  folder of a run of vit_jax, of one of its steps, or of a tree of arrays saved
  with Orbax. Names and shapes of the parameters decide the model. No code of a
  file is run.

  Args:
    path: A path on disk or in a bucket (gs://); or a file to download:
      https://..., hf-hub:OWNER/NAME[@REV].
    num_classes: Width of a new head, whatever head the file has. Its kernel is
      zeros; its classes have no names; its loss is `loss`, by default
      "softmax". 0: no head, so that the model returns the input of the head.
      None: the head of the file.
    image_size: (height, width), or the side of a square, pixels. The position
      embedding is resampled. None: the size of the weights' training.
    patch: Side of a patch, pixels. The patch embedding is resized by the
      pseudoinverse of arXiv:2212.08013. None: the patch of the weights.
    grid: Rows and columns of the position embedding, if they are not equal and
      the file does not state them.
    posemb_filter: Method that resamples the position embedding, a name of
      `vit_jax.models.resample.METHODS`. None: that of the authors' own code,
      whatever the library of the file: "zoom" (the paper's) for ViT, others for
      other models, see docs/weights.md. A checkpoint of vit_jax states it.
    loss: Loss with which the head was trained, which decides the probabilities
      of `predict`: "softmax", "sigmoid", "bce" (also a sigmoid) or
      "regression" (numbers). None: the loss that a run or Hugging Face's
      config.json states. If none is stated, it is "sigmoid" for the 21,843
      classes of Google's ImageNet-21k files and "softmax" for all others. This
      is wrong for other heads trained with a sigmoid, such as AugReg's from
      ImageNet-1k alone, because their files do not state it.
    mean, std: Normalisation of the training images, if the file does not state
      it. mean is "imagenet" (DINO, MAE, DeiT), "clip" or "half" (Google's,
      [-1, 1]), which includes std. Or both are one number, or one for each
      channel, for pixels in [0, 1]: for images in [0, 1] use mean=0, std=1; for
      images in [0, 255] use mean=0, std=1/255. The normalisation becomes part
      of the patch embedding, so that the model always takes images in [-1, 1].
      None: as the file states; if it does not, that of the publishers of such
      arrays, or "half", with a note.
    background: Colour behind transparent images: "white", "black", "#ff8800".
      None: the colour of the file; if it has none, fully transparent pixels
      become white, and other pixels lose their alpha channel.
    verbose: Whether to print the `report` of the result: which weights were
      loaded, resized, re-initialised and ignored.
    **options: Options of the model that replace those of the file, such as
      dtype="bfloat16", gelu="erf", num_heads=3. With channels=1 the patch
      embedding is folded, and the model takes grey images.

  Raises:
    FileNotFoundError: There is no file.
    ValueError: The file is damaged, unsafe, unknown or incomplete; or an
      argument is unknown or has another type.

  Example:
    >>> import vit_jax
    >>> vit = vit_jax.load("B_16.npz", image_size=384)  # doctest: +SKIP
    >>> vit.predict("cat.jpg", top=1)[0][0].name  # doctest: +SKIP
    'tiger cat (n02123159)'
    >>> features = vit.features("photos/*.jpg")  # doctest: +SKIP
    >>> logits, out = vit(images)  # floats in [-1, 1]  # doctest: +SKIP
  """
  vit = load_on_host(
    path,
    num_classes=num_classes,
    image_size=image_size,
    patch=patch,
    grid=grid,
    posemb_filter=posemb_filter,
    loss=loss,
    mean=mean,
    std=std,
    background=background,
    verbose=verbose,
    **options,
  )
  return dataclasses.replace(vit, params=_to_device(vit.params))


def load_on_host(
  path: str | os.PathLike,
  *,
  num_classes: int | None = None,
  image_size: int | tuple[int, int] | None = None,
  patch: int | None = None,
  grid: int | tuple[int, int] | None = None,
  posemb_filter: str | None = None,
  loss: str | None = None,
  mean: normalisation.Statement = None,
  std: normalisation.Statement = None,
  background: str | None = None,
  verbose: bool = False,
  **options,
) -> Pretrained:
  """Loads a model as `load`, with numpy arrays as parameters.

  A model may be larger than the memory of a device: a run splits the further
  models of its objective over all devices.
  """
  if loss not in (None, *HEADS):
    raise ValueError(f"loss: got {loss!r}, expected one of {', '.join(HEADS)}.")
  if background is not None:
    colour(background)  # raises ValueError
  options = _checked_options(options)
  if num_classes is not None and operator.index(num_classes) < 0:
    raise ValueError(unexpected("num_classes", num_classes, "0 or more"))
  size = _pair("image_size", image_size)
  grid = _pair("grid", grid)
  file = weights.read(path, grid=grid, options=options, mean=mean, std=std)
  try:
    config = weights.identify(file.params, {**file.options, **options})
    size = size or weights.trained_at(file)
    ops, notes = preprocessing(file, size)
    ops = with_decoding(ops, background=background)
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  if loss is None and num_classes is None:
    notes = (*notes, *assumptions.of_head(file))
  config = dataclasses.replace(config.for_inference(), **options)
  if patch is not None:
    config = config.with_patch(patch)
  width = weights.num_classes(file.params, config)
  model = build(config, width)
  target = jax.eval_shape(
    model.init,
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, *size, config.channels), jnp.float32),
  )
  target = only_params(target)
  params, report = weights.adapt(
    dataclasses.replace(file, notes=(*file.notes, *notes)),
    target,
    config,
    size,
    posemb_filter=posemb_filter,
    resize_patch=patch is not None,
  )
  vit = Pretrained(
    config=config,
    params=params,
    num_classes=width,
    image_size=size,
    class_names=file.class_names,
    # Images of other channels than files have are given as arrays.
    ops=for_channels(ops, config.channels) if config.channels == 1 else ops,
    loss=loss or file.loss or "softmax",
    report=report,
    posemb_filter=posemb_filter or file.posemb_filter,
  )
  if num_classes is not None:
    vit = dataclasses.replace(
      with_head(vit, num_classes), loss=loss or "softmax"
    )
  if verbose:
    print(weights.format_report(vit.report))
  parts = report.reinitialised
  if num_classes is not None:
    parts = [path for path in parts if not config.is_head(path)]
  if parts:
    parts = ", ".join(parts)
    raise ValueError(f"{path}: parts of the head do not fit together: {parts}.")
  return vit


def with_head(vit: Pretrained, num_classes: int) -> Pretrained:
  """Gives a model a new head with initial values, or removes the head.

  Args:
    vit: A model; its layer before the head, if any, stays.
    num_classes: Outputs of the new head; 0 for none.
  """
  is_head = vit.config.is_head
  model = build(vit.config, num_classes)

  def init(key, images):  # under jit, only the head is computed
    params = only_params(model.init(key, images))
    return {k: v for k, v in params.items() if is_head(f"{k}/")}

  images = np.zeros((1, *vit.image_shape), np.float32)
  head = jax.jit(init)(jax.random.key(0), images) if num_classes else {}
  params = {k: v for k, v in vit.params.items() if not is_head(f"{k}/")}
  loaded = vit.report.loaded
  report = dataclasses.replace(
    vit.report,
    loaded={k: v for k, v in loaded.items() if not is_head(k)},
    reinitialised=tuple(flatten_dict(head, sep="/")),
    ignored=(*vit.report.ignored, *filter(is_head, loaded)),
  )
  return dataclasses.replace(
    vit,
    params=params | jax.tree.map(np.asarray, head),
    num_classes=num_classes,
    class_names=None,
    report=report,
  )


def preprocessing(
  file: weights.Weights, size: tuple[int, int]
) -> tuple[str, tuple[str, ...]]:
  """Returns the preprocessing of a file for an image size, and notes.

  It is the preprocessing that the file states. For another size, filter and
  share of the image are kept. If the file states none, or its preprocessing
  cannot give the size, the whole image is resized, as in Google's evaluation.

  Args:
    file: The file of weights.
    size: (height, width), pixels.
  """
  ops, whole = file.ops, eval_preprocessing.google(size).ops
  if ops is not None:
    whole = eval_preprocessing.decoded_as(ops, whole)
  if ops is None or pixels.is_random(ops):  # from a run without evaluation
    return whole, ()
  if size_after(ops) == size:
    return ops, ()
  if text := eval_preprocessing.whole_and_centre(ops, size):
    return text, ()
  if path := eval_preprocessing.taken_apart(ops):
    new = path.at(size)
    if file.crop_share and new.short:  # the share in `path` is rounded
      new = new.cropped(file.crop_share)
    whole = eval_preprocessing.decoded_as(ops, new.ops)
    if (new.short is None) == (path.short is None):
      return whole, ()
  return whole, (
    f"preprocessing is {whole}, because that of the weights, {ops}, cannot give"
    f" images of {size[0]} x {size[1]} pixels.",
  )


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
  """Returns options of a model, converted to the types of their fields.

  Raises:
    ValueError: No family has all of the options, or a value has another type.
  """
  families, own = FAMILIES, str(options.get("name"))
  if names.is_path(own):
    families = {own: names.resolve(own, FAMILIES, "load: name", ModelConfig)}
  fields = {
    name: [f.name for f in dataclasses.fields(cls)]
    for name, cls in families.items()
  }
  name = next((n for n, f in fields.items() if options.keys() <= {*f}), None)
  if name is None:
    known = dict.fromkeys(k for keys in fields.values() for k in keys)
    unknown = sorted(options.keys() - known.keys()) or sorted(options)
    near = "".join(nearest(key, [*ARGUMENTS, *known]) for key in unknown)
    got = ", ".join(unknown)
    expected = f"{', '.join(ARGUMENTS)}, or options of one model family"
    raise ValueError(unexpected("load", got, expected, near.strip()))
  checked = model_from_dict({"name": name, **options})
  return {key: getattr(checked, key) for key in options}


def _pair(name: str, value: Any) -> tuple[int, int] | None:
  """Returns two whole numbers from 1, given as two or as one; None for None."""
  if value is None:
    return None
  sides = (value, value) if np.ndim(value) == 0 else tuple(value)
  if len(sides) != 2 or any(operator.index(side) < 1 for side in sides):
    raise ValueError(unexpected(name, repr(value), "one or two sides from 1"))
  return operator.index(sides[0]), operator.index(sides[1])


def _array(images: Any) -> np.ndarray | jax.Array:
  """Returns images as an array; jax's stay where they are."""
  return images if isinstance(images, jax.Array) else np.asarray(images)


def _is_float(images: np.ndarray | jax.Array) -> bool:
  return jnp.issubdtype(images.dtype, jnp.floating)


def _check_range(images: np.ndarray | jax.Array) -> None:
  """Refuses floats in 0 to 255, and warns about other ranges than [-1, 1].

  A batch is taken for images in [0, 1] if no value is negative and some are
  below and above 0.5.
  """
  if isinstance(images, jax.core.Tracer) or not images.size:
    return
  low, high = float(images.min()), float(images.max())
  text = f"got images with values from {low:.3g} to {high:.3g}, {FLOATS}"
  if high > MOST_ODD:
    raise ValueError(f"{text}.")
  if max(-low, high) > MOST or 0 <= low < 0.5 < high <= 1:
    warnings.warn(
      f"{text}; mean and standard deviation of the training images are part of"
      " the first layer.",
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
  """Yields an answer for each image, also for unreadable ones."""
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


def _values(numbers: np.ndarray, names: Sequence[str]) -> list[Value]:
  return [Value(names[k], float(v), k) for k, v in enumerate(numbers)]


def _to_device(tree: dict[str, Any]) -> dict[str, Any]:
  """Moves arrays to the device, and frees each on the host at once."""
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
