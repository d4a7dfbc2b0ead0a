"""ViT-H/14 from scratch at 224 px: Table 3 of arXiv:2010.11929.

Run: python -m vit_jax.train --config=configs/vit_h14.py:imagenet2012
The argument is imagenet2012, imagenet21k or folder:/path/to/images.
Table 3 has no row of H/14 on ImageNet-21k; the values of L/16 are taken.
Result: not yet run at full length.
"""

from vit_jax.config.recipes import table3


def get_config(dataset: str = "imagenet2012"):
  return table3("H/14", dataset)
