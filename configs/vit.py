"""ViTs from scratch at 224 px: Table 3 of arXiv:2010.11929.

Run: vit-jax train --config=vit:L/16,imagenet21k
The argument is one of `MODELS`, a comma, and imagenet2012, imagenet21k or
folder:/path/to/images. configs/vit_b16.py and so on are its rows, with costs
and results.

Source: Table 3; section 3.1 for the tanh layer; issue threads of
google-research/vision_transformer for the loss (sigmoid, head bias -10) and the
final learning rate of 1e-5. Clipping is stated only for ImageNet. For ImageNet
the paper does not state the loss; scenic's port of the recipe uses sigmoid. The
paper does not state the label smoothing; here it is 0, scenic's default. Table
3 has no row for H/14 on ImageNet-21k; the values are those of L/16. A folder
has ImageNet's recipe with a batch of 512, a learning rate of 1e-3 and 500 steps
of warm-up, because folders are smaller (these values are not published).

Few-shot: 1, 5, 10 and 25 images per class, three draws, an L2 weight of 2^10:
`fewshot_<data set>/<k>shot`, and the mean `fewshot/<k>shot`. An evaluation
needs about 153,000 forward passes, the arithmetic of 12.5 steps: an eighth of a
percent of the run. The seven data sets must be on disk (config.fewshot).
Section 4.1 of the paper states neither layer, L2 weight nor draws. They are
those of big_vision: evaluators/fewshot_lsr.py (the layer is the input of the
head, after the tanh) and configs/common_fewshot.py.

Cost: 10 to 1,278 exaFLOPs; each file states its own.
Result: not yet run at full length.
"""

from vit_jax.config import defaults, fewshot_evals
from vit_jax.options import nearest

# Model -> images of a microbatch on each device: as many as 16 GiB hold, where
# that is faster. The results are the same.
# (benchmarks/notes/performance_log.md)
MODELS = {"B/32": 64, "B/16": 64, "L/32": 64, "L/16": 64, "H/14": 16}
# Data set -> passes, peak learning rate, its schedule, weight decay, clipping.
DATASETS = {
  "imagenet2012": (300.0, 3e-3, "cosine", 0.3, 1.0),  # 93,835 steps
  "imagenet21k": (90.0, 1e-3, "linear", 0.03, None),  # 310,823 steps
}


def get_config(arg: str = "B/16,imagenet2012"):
  model, _, dataset = arg.partition(",")
  if model not in MODELS:
    raise ValueError(
      f"got model {model!r}, expected one of {', '.join(MODELS)}."
      + nearest(model, MODELS)
    )
  name, colon, _ = dataset.partition(":")  # then a path, or a version
  is_own = name not in DATASETS
  if is_own and not colon:
    raise ValueError(
      f"got data set {dataset!r}, expected {', '.join(DATASETS)} or"
      f" folder:/path.{nearest(name, DATASETS)}"
    )
  row = DATASETS["imagenet2012" if is_own else name]

  c = defaults()
  c.total_epochs, c.optim.lr, c.optim.schedule = row[:3]
  c.optim.weight_decay, c.optim.clip_norm = row[3:]
  c.objective.loss = "sigmoid"
  c.model.variant = model
  c.model.pre_logits = True
  c.model.head_bias = -10.0
  c.model.dropout = 0.1
  c.model.dtype = "bfloat16"
  c.data.batch_size = 4096
  c.data.ops = "decode_inception_crop(224)|flip_lr"
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = MODELS[model]
  c.optim.warmup_steps = 10_000
  c.optim.end_lr = 1e-5
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 50_000
  c.data.dataset = dataset
  val = {"kind": "classification", "every_steps": 2500, "split": "validation"}
  if name == "imagenet21k":
    # 21,843 classes; the images after the first 51,200 are trained on.
    c.data.split, val["split"] = "full[51200:]", "full[25600:51200]"
  c.evals = {"val": val}
  if is_own:
    c.data.batch_size = 512
    c.optim.lr = 1e-3
    c.optim.warmup_steps = 500
    c.evals.val.split = "val"
  else:
    c.evals.update(
      fewshot_evals(
        ops="decode|resize(256)|central_crop(224)",
        shots=(1, 5, 10, 25),
        seeds=(0, 1, 2),
        l2=(1024.0,),
        every_steps=10_000,
      )
    )
  return c
