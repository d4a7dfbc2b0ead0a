"""k-NN, linear and few-shot scores of DINOv2 and DINOv3.

Run: vit-jax evaluate --workdir=runs/dinov2 \
  --config=probes:weights=dinov2_vits14_pretrain.pth \
  --checkpoint=dinov2_vits14_pretrain.pth
Arguments: weights (a file whose model is known), version (of LAYERS, which
decides the linear heads), dataset (imagenet2012, another TFDS data set with the
splits train and test, or folder:/path with train and val).

The protocols are the authors', except for few-shot.
- knn: the class token after the final norm; the vote of the 20 (also 10, 100
  and 200) nearest images of `train`, weighted by exp(cosine / 0.07).
- linear: heads on the class token of the last block or of the last four, with
  and without the mean of the patches (version 2), or on class token and mean of
  the patches (version 3). 13 learning rates, times 1024 / 256. 12,500 steps of
  1,024 images, which are bicubic crops of 224 px, flipped at random. Momentum
  0.9, no weight decay, a cosine.
- fewshot: ridge regression on the class token.

For scoring, the shorter side becomes 256 px (bicubic), and the central 224 px
are used.
Differences to the authors' code: the head is chosen on a held-out tenth of
`train` (there: on the scored images); TensorFlow draws the window of a crop;
the heads begin at zero.

Cost: linear needs 12.8 million forward passes, the others 1.3 million.
Result: not yet run. The publishers' top-1 on ImageNet by k-NN and by linear
heads (version 2; the last two columns are with registers):
  S/14   79.0  81.1    79.1  80.9
  B/14   82.1  84.5    82.0  84.6
  L/14   83.5  86.3    83.8  86.7
  g/14   83.5  86.5    83.7  87.1
DINOv3 (version 3): 82.0 and 83.5 for L/16 trained only on ImageNet; for other
weights see arXiv:2508.10104.
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
