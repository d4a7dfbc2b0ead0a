"""k-NN, linear and few-shot scores of DINOv2 and DINOv3, as by their authors.

Run: vit-jax evaluate --workdir=runs/dinov2 \
  --config=dino:weights=dinov2_vits14_pretrain.pth \
  --checkpoint=dinov2_vits14_pretrain.pth
Arguments: weights (a file, of which the model is known), version (of LAYERS:
which linear heads), dataset (imagenet2012, another of TFDS with splits train
and test, or folder:/path with train and val).

knn: the class token behind the last norm; the vote of the 20, and of the 10,
100 and 200 nearest of `train`, weighted by exp(cosine / 0.07). linear: heads on
the class token of the last block, or of the last four, with and without the
mean of the patches (version 2), or on class token and mean of patches (3); 13
learning rates, times 1024 / 256; 12,500 steps of 1,024 images, which are a crop
of 224 px by a bicubic filter, flipped; momentum 0.9, no decay, a cosine.
Images that are scored: the shorter side 256 px by a bicubic filter, the middle
224. fewshot: ridge regression on the class token, which is not the authors'.
Different here: the head is chosen on a tenth of `train` that is held out (there
on the images that are scored); the window of a crop is drawn by TensorFlow; the
heads begin at zero.

Cost: linear passes 12.8 million images forward, the others 1.3 million.
Result: not yet run. Expected are the publishers', top-1 of ImageNet by k-NN and
by linear heads (version 2; with registers behind):
  S/14   79.0  81.1    79.1  80.9
  B/14   82.1  84.5    82.0  84.6
  L/14   83.5  86.3    83.8  86.7
  g/14   83.5  86.5    83.7  87.1
DINOv3 (version 3): L/16 that was trained on ImageNet alone 82.0 and 83.5; those
of the other weights are in arXiv:2508.10104.
Source: arXiv:2304.07193; facebookresearch/dinov2 and dinov3, eval/linear.py,
eval/knn.py and README.
"""

from vit_jax.config import arguments, check_choices, defaults

LAYERS = {  # version -> what linear heads read
  "2": ("cls", "cls+patches", "cls*4", "cls*4+patches"),
  "3": ("cls+patches",),
}
# Learning rates for 256 images.
RATES = (
  *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
  *(1e-2, 2e-2, 5e-2, 0.1),
)
ARGUMENTS = {"weights": "", "version": "2", "dataset": "imagenet2012"}


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  check_choices(args, {"version": LAYERS})
  if not args["weights"]:
    raise ValueError("expected weights=FILE, the file that is scored.")
  import dataclasses

  from vit_jax import weights

  try:
    file = weights.read(args["weights"])
  except FileNotFoundError as e:
    raise ValueError(f"weights: {e}") from None
  model = weights.identify(file.params, file.options).for_inference()
  kind = args["dataset"].split(":")[0]
  split = {"imagenet2012": "validation", "folder": "val"}.get(kind, "test")

  c = defaults()
  c.total_steps = 1  # nothing is trained
  values = dataclasses.asdict(model)
  c.model.update({k: v for k, v in values.items() if v is not None})
  c.model.dtype = "bfloat16"
  c.data.dataset, c.data.split = args["dataset"], "train"
  c.data.batch_size = 1024
  c.data.ops = (
    "decode_inception_crop(224, 8, 100, method='bicubic', antialias=True)"
    "|flip_lr"
  )
  features = {
    "train_split": "train",
    "split": split,
    "ops": "decode|resize_small_torch(256)|central_crop_torch(224)",
  }
  c.evals = {
    "knn": {**features, "kind": "knn", "layer": "cls"},
    "fewshot": {**features, "kind": "fewshot", "layer": "cls"},
    "linear": {
      **features,
      "kind": "linear",
      "layers": LAYERS[args["version"]],
      "lrs": tuple(rate * 1024 / 256 for rate in RATES),
      "weight_decays": (0.0,),
      "steps": 12_500,
      "whiten": False,
      "train_ops": c.data.ops,
    },
  }
  return c
