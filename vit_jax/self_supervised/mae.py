"""MAE: the pixels of masked patches are predicted from the visible ones.

Three quarters of the patches of an image are masked, drawn uniformly for each
image and step. The encoder computes the visible patches alone, in the order in
which they were drawn (the order changes no result but for rounding), with
the positions that they have on the whole grid. A small decoder, with a mask
token in the place of each other patch and positions of its own, predicts the
pixels. The loss is the mean squared error of the masked patches. Labels are not
used.

Source: arXiv:2111.06377; facebookresearch/mae.
  Differences: config.model.posemb="sincos2d" has other frequencies in the
  encoder (`self_supervised.mae_model.sincos`; those of MAE's files are read as
  a learned table). Registers and a distillation token, which the authors'
  network does not have, pass through the decoder as its class token does.
  The patch embedding gets images in [-1, 1]. It starts as the same function of
  the pixels, but as it is twice as steep, it changes half as fast.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import RunShape, normalise
from vit_jax.families.vit import ViTConfig
from vit_jax.objectives.masked_patch import OfPatches
from vit_jax.objectives.objective import Learner, Pictures
from vit_jax.options import AT_LEAST_1, Limit, option, unexpected

INSIDE = Limit("a share above 0 and below 1", lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True)
class MAE(OfPatches):
  """Prediction of the pixels of masked patches, without labels."""

  kind: str = "mae"
  target: str = option(
    "norm_pixels",
    "what is predicted of a patch",
    {
      "norm_pixels": "its pixels, minus their mean, divided by their deviation",
      "pixels": "its pixels, standardised with ImageNet's colours",
    },
  )
  mask_ratio: float = option(
    0.75, "share of the patches that are masked", limit=INSIDE
  )
  decoder_width: int = option(
    512, "width of a token in the decoder, a multiple of 4", limit=AT_LEAST_1
  )
  decoder_depth: int = option(
    8, "number of blocks of the decoder", limit=AT_LEAST_1
  )
  decoder_heads: int = option(
    16, "attention heads of the decoder", limit=AT_LEAST_1
  )

  own: ClassVar[str] = "mae/"

  def errors(self) -> Iterator[str]:
    """See `Objective`."""
    width, heads = self.decoder_width, self.decoder_heads
    if width % 4 or (heads > 0 and width % heads):
      expected = f"a multiple of 4 and of decoder_heads={heads}"
      yield unexpected("config.objective.decoder_width", width, expected)

  def decoder(self, model) -> ViTConfig:
    """Returns the sizes of the decoder's blocks, the authors' plain ones."""
    return ViTConfig(
      width=self.decoder_width,
      depth=self.decoder_depth,
      mlp_dim=4 * self.decoder_width,
      num_heads=self.decoder_heads,
      pool="gap",
      posemb="none",
      gelu="erf",
      dtype=model.dtype,
      remat=getattr(model, "remat", "none"),
    )

  def num_tokens(self, model, image_size) -> int:
    """Returns the number of visible tokens."""
    from vit_jax.self_supervised.mae_model import num_visible

    rows, columns = model.grid(image_size)
    masked = rows * columns - num_visible(rows * columns, self.mask_ratio)
    return model.num_tokens(image_size) - masked

  def make(self, model, run_shape, models):
    """Returns the network with its decoder, and the loss.

    The loss counts the masked patches of valid rows.

    Args:
      model: `config.model`, with patches of pixels.
      run_shape: image_size is used.
      models: Not used.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax.models import build
    from vit_jax.self_supervised import mae_model as lib

    side, (rows, columns) = model.pixel_patch, model.grid(run_shape.image_size)
    num_patches = rows * columns
    num_kept = lib.num_visible(num_patches, self.mask_ratio)
    module = lib.MAEModel(build(model, 0), self.decoder(model), side * side * 3)

    def loss(params, batch, rng, step):
      # Another key than those that linen derives for dropout.
      key = jax.random.fold_in(rng, 1)
      order = lib.draw(key, batch["index"], num_patches)
      outputs = module.apply(
        {"params": params},
        normalise(batch["image"]),
        order,
        num_kept,
        batch["index"],
        rngs={"dropout": rng},
        method="predict_patches",
      )
      pixels = lib.pixels_of(batch["image"], side)
      if self.target == "norm_pixels":
        pixels = lib.standardised(pixels)
      losses = jnp.square(outputs - pixels).mean(-1)
      counts = lib.is_masked(order, num_kept) * batch["mask"][:, None]
      return jnp.sum(losses * counts), jnp.sum(counts), {}

    return Learner(
      module,
      loss,
      init=lambda params, rng: lib.initial(params, rng, model),
      train_flops=6.0 * self._macs(model, run_shape.image_size, num_kept),
    )

  def _macs(self, model, image_size, num_kept: int) -> int:
    """Returns multiply-adds of one image's forward pass.

    Args:
      model: `config.model`.
      image_size: (height, width) in pixels.
      num_kept: Number of visible patches.
    """
    side, (rows, columns) = model.pixel_patch, model.grid(image_size)
    num_patches, d = rows * columns, model.size.width
    # The encoder's blocks are those of an image of the visible patches.
    encoder = model.forward_macs((side, side * num_kept), 0)
    encoder += (num_patches - num_kept) * side * side * 3 * d  # embedded, too
    num_others = model.num_tokens(image_size) - num_patches
    tokens, width = num_patches + num_others, self.decoder_width
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    ends = (num_kept + num_others) * d * width
    ends += num_patches * width * side * side * 3
    return encoder + self.decoder_depth * block + ends

  def pictures(self, model, params, images):
    """Returns images, masked images and reconstructions; see `Objective`."""
    import jax
    import jax.numpy as jnp

    from vit_jax.self_supervised import mae_model as lib

    size, side = images.shape[1:3], model.pixel_patch
    module = self.make(model, RunShape(0, size), {}).module
    rows, columns = model.grid(size)
    num_kept = lib.num_visible(rows * columns, self.mask_ratio)
    records = jnp.arange(len(images))
    order = lib.draw(jax.random.key(0), records, rows * columns)

    @jax.jit
    def predict(params, images):
      outputs = module.apply(
        {"params": params},
        normalise(images),
        order,
        num_kept,
        None,
        method="predict_patches",
      )
      pixels = lib.pixels_of(images, side)
      grey = lib.pixels_of(jnp.full_like(images, 128), side)
      if self.target == "norm_pixels":
        mean, deviation = lib.moments(pixels)
        outputs = outputs * deviation + mean
      masked = lib.is_masked(order, num_kept)[..., None] > 0
      parts = pixels, *(jnp.where(masked, x, pixels) for x in (grey, outputs))
      shown = [lib.images_of(x, (rows, columns)) for x in parts]
      return jnp.stack(shown, axis=1)

    text = "Each image, its visible patches, and the other patches as predicted"
    if self.target == "norm_pixels":
      text += " from them, with the mean and the contrast of the true patches"
    found = jax.device_get(predict(params, jnp.asarray(images)))
    return Pictures("Reconstructions", f"{text}.", found)
