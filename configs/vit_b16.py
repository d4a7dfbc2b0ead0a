"""ViT-B/16 from scratch at 224 px: Table 3 of arXiv:2010.11929.

Run: vit-jax train --config=vit_b16:imagenet2012
The argument is imagenet2012, imagenet21k or folder:/path/to/images.
Batch 4,096 (64 images of a microbatch on each device), dropout 0.1, sigmoid
loss, 10,000 steps of warm-up; configs/vit.py has the code and the sources.
                epochs  learning rate    weight decay  clipping
  imagenet2012  300     0.003, cosine    0.3           1
  imagenet21k   90      0.001, linear    0.03          none
Few-shot accuracy is scored on seven data sets, which must be on disk
(config.fewshot): caltech101, cars196, cifar100, dtd, oxford_iiit_pet,
uc_merced, imagenet2012.
Cost: 40.5 exaFLOPs on imagenet2012, 134.3 on imagenet21k; by the planner's
estimate 422 chip-hours of TPU v5e on imagenet21k, and 0.30 times that on
imagenet2012, which has 0.30 times the steps (docs/tasks/plan.md).
Result: not yet run at full length. The paper's Table 5, ImageNet after
fine-tuning at 384 px: 77.91 %; from imagenet21k 83.97 %.
"""

from vit_jax.config import recipe


def get_config(dataset: str = "imagenet2012"):
  return recipe(f"vit:B/16,{dataset}")
