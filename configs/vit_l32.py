"""ViT-L/32 from scratch at 224 px: Table 3 of arXiv:2010.11929.

Run: python -m vit_jax.train --config=configs/vit_l32.py:imagenet2012
The argument is imagenet2012, imagenet21k or folder:/path/to/images.
Result: not yet run at full length.
"""

from vit_jax.config.recipes import table3


def get_config(dataset: str = "imagenet2012"):
  return table3("L/32", dataset)
