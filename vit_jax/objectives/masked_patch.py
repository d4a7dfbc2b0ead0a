"""Masked patch prediction: corrupted patches are predicted from the others.

Half of the patches of an image are corrupted: the embedding is replaced by a
learned mask token (80 %) or by that of another patch of the image (10 %), or
does not change (10 %). The loss is that of the corrupted patches only. Labels
are not used.

Source: arXiv:2010.11929, section 4.6 and appendix B.1.2. No code was published.
  Where the paper does not say: exactly half of the patches; the kind of
  corruption is drawn for each patch independently; 0..255 has 8 equal bins per
  colour, the first from 0 to 31; a small patch has the means of 4 x 4 cells;
  heads are linear and start at zero; the loss of a patch is the mean over its
  predictions, not the sum.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import normalise
from vit_jax.objectives.objective import Learner, Objective
from vit_jax.options import option, unexpected

GRID = 4  # cells on a side of a patch with target "small"


@dataclasses.dataclass(frozen=True)
class OfPatches(Objective):
  """An objective that predicts the pixels of patches; no head is trained."""

  trains_head: ClassVar[bool] = False

  def model_errors(self, model, image_size) -> Iterator[str]:
    """See `Objective`."""
    side, kind = model.pixel_patch, f"config.objective.kind={self.kind}"
    if side is None:
      expected = f"a model with patches of pixels, such as B/16, for {kind}"
      yield unexpected("config.model.variant", repr(model.variant), expected)
      return
    if model.channels != 3:
      expected = f"3 for {kind}, which predicts colours"
      yield unexpected("config.model.channels", model.channels, expected)
    rows, columns = model.grid(image_size)
    if rows * columns < 2:
      got = f"images of {image_size[0]}x{image_size[1]} pixels"
      expected = f"2 patches of {side} pixels or more for {kind}"
      yield unexpected("config.data.ops", got, expected)

  def start_errors(self, model) -> Iterator[str]:
    """See `Objective`."""
    for name, adds_layers in (
      ("pool", lambda v: v == "map"),
      ("pre_logits", lambda v: v),
      ("final_norm", lambda v: v == "pooled"),
      ("projection", lambda v: v is not None),
    ):
      value = getattr(model, name, None)
      if adds_layers(value):
        expected = (
          f"no layer that config.objective.kind={self.kind} does not train; set"
          " it when you fine-tune"
        )
        yield unexpected(f"config.model.{name}", repr(value), expected)


@dataclasses.dataclass(frozen=True)
class MaskedPatch(OfPatches):
  """Prediction of corrupted patches from the others, without labels."""

  kind: str = "masked_patch"
  target: str = option(
    "mean_color",
    "what is predicted of a patch",
    {
      "mean_color": "its mean colour, 3 bits a channel: one of 512",
      "small": "the mean colours of its 4 x 4 cells: 16 of 512",
      "pixels": "all its pixels in [-1, 1], by their mean squared error",
    },
  )

  own: ClassVar[str] = "masked_patch/"

  def model_errors(self, model, image_size) -> Iterator[str]:
    """See `Objective`."""
    yield from super().model_errors(model, image_size)
    side = model.pixel_patch
    if side and self.target == "small" and side % GRID:
      expected = f"another target, or a patch of a multiple of {GRID} pixels"
      yield unexpected("config.objective.target", "'small'", expected)

  def make(self, model, run_shape, models):
    """Returns the network with its own parameters, and the loss.

    The loss counts the corrupted patches of valid rows. `accuracy` is also
    logged: the share of colours that are predicted right.

    Args:
      model: `config.model`, with patches of pixels.
      run_shape: image_size is used.
      models: Not used.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from vit_jax.models import build
    from vit_jax.models import masked_patch as lib

    side, (rows, columns) = model.pixel_patch, model.grid(run_shape.image_size)
    num_cells = {"mean_color": 1, "small": GRID}.get(self.target)
    module = lib.MaskedPatchModel(
      network=build(model, 0),
      num_outputs=(
        num_cells**2 * lib.NUM_COLORS if num_cells else side * side * 3
      ),
      width=model.size.width,
      dtype=model.dtype,
    )

    def loss(params, batch, rng, step):
      # Another key than those that linen derives for dropout.
      plan = lib.draw(
        jax.random.fold_in(rng, 1), batch["index"], rows * columns
      )
      outputs = module.apply(
        {"params": params},
        normalise(batch["image"]),
        plan,
        batch["index"],
        rngs={"dropout": rng},
        method="predict_patches",
      )
      patches = lib.chosen(lib.patches_of(batch["image"], side), plan.places)
      if num_cells is None:
        pixels = normalise(patches).reshape(outputs.shape)
        losses, right = jnp.square(outputs - pixels).mean(-1), None
      else:
        colors = lib.colors(patches, num_cells)
        logits = outputs.reshape(*colors.shape, lib.NUM_COLORS)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        losses = cross_entropy(logits, colors).mean(-1)
        right = (logits.argmax(-1) == colors).mean(-1)
      counts = jnp.broadcast_to(batch["mask"][:, None], losses.shape)
      count, named = jnp.sum(counts, dtype=jnp.float32), {}
      if right is not None:
        named["accuracy"] = jnp.sum(right * counts), count
      return jnp.sum(losses * counts), count, named

    return Learner(module, loss)
