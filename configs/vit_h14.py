"""ViT-H/14 from scratch at 224 px: Table 3 of arXiv:2010.11929.

Run: vit-jax train --config=vit_h14:imagenet2012
The argument is imagenet2012, imagenet21k or folder:/path/to/images.
Table 3 has no row of H/14 on ImageNet-21k; the values of L/16 are taken.
Few-shot accuracy is scored on seven data sets, which must be on disk
(config.fewshot): caltech101, cars196, cifar100, dtd, oxford_iiit_pet,
uc_merced, imagenet2012.
Cost: 385.8 exaFLOPs on imagenet2012, 1,278.1 on imagenet21k; by the planner's
estimate 3,311 chip-hours of TPU v5e on imagenet21k (docs/plans.md), and 0.30 of
that, as of the steps, on imagenet2012.
Result: not yet run at full length. Expected of ImageNet after fine-tuning at
384 px, from imagenet21k (the paper's Table 5): 85.13 %.
"""

from vit_jax.config.recipes import table3


def get_config(dataset: str = "imagenet2012"):
  return table3("H/14", dataset)
