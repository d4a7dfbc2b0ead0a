"""By which preprocessing a file of weights is scored."""

from typing import Any

from vit_jax import weights
from vit_jax.config import eval_preprocessing
from vit_jax.config.preprocessing import image_size
from vit_jax.data import pixels
from vit_jax.scoring.published_scores import Published

TIMM_SHARE = 0.9  # of the shorter side, of a ViT below 384 pixels


def choose(
  file: weights.Weights,
  model: Any,
  size: tuple[int, int],
  protocol: str,
  published: tuple[Published, ...],
) -> tuple[str, str]:
  """Returns the protocol by which a file is scored, and its operations.

  For "auto" it is that which the file states; else that of the first published
  score; else that of its format: timm's for timm's names, big_vision's for
  Google's names without a class token, and Google's for all others. timm crops
  a share of 0.9, or from 384 pixels on everything, where no row says otherwise.

  Args:
    file: The file.
    model: Its model.
    size: (height, width) of its images, pixels.
    protocol: "own", "timm", "google", "big_vision" or "auto".
    published: Its published scores.

  Raises:
    ValueError: The protocol is "own" and the file states none; or the published
      model's images are not normalised to [-1, 1], and the file does not say
      so.
  """
  own = file.ops
  if own and (image_size(own) != size or pixels.is_random(own)):
    own = None  # of a run without evaluation
  if protocol == "own" and not own:
    raise ValueError(
      f"{file.path}: got --protocol=own, but it states no preprocessing;"
      " expected timm, google or big_vision."
    )
  if file.ops is None and any(row.mean != "0.5" for row in published):
    raise ValueError(
      f"{file.path}: got weights of timm's {published[0].name} without a"
      " config.json that states mean and deviation, which are ImageNet's;"
      " expected it beside the file."
    )
  if own and protocol in ("auto", "own"):
    return "own", own
  if protocol == "auto":
    if published:
      protocol = published[0].protocol
    elif file.format == "timm":
      protocol = "timm"
    elif getattr(model, "pool", "token") != "token":
      protocol = "big_vision"
    else:
      protocol = "google"
  if protocol == "timm":
    shares = [row.share for row in published if row.share]
    share = next(iter(shares), TIMM_SHARE if min(size) < 384 else 1.0)
    return protocol, eval_preprocessing.timm(size, share).ops
  make = {
    "google": eval_preprocessing.google,
    "big_vision": eval_preprocessing.big_vision,
  }
  return protocol, make[protocol](size).ops
