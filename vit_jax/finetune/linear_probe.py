"""Linear probing before fine-tuning (config.init_head=linear_probe).

A new head of zeros changes pre-trained features before the head has learned to
read them. A head that is a linear classifier on the frozen features does not.
The classifier is the ridge regression of `vit_jax.ridge`, fitted on the
training images without augmentation. Its penalty and the scale of its logits
are chosen on held-out images:

  scores = ((feature - mean) / std, 100) W,  logits = scale scores
  kernel = scale W / std,  bias = scale (100 w_bias - mean W / std)

If all held-out images were right, their loss alone would choose an infinite
scale, and fine-tuning would have no gradient. One image is therefore added to
them, which has each of the K classes with probability 1 / K. Of m held-out
images, each then has a share e = 1 / (m + 1) of this image:

  loss = (1 - e) cross_entropy(label) + e mean_k cross_entropy(k)

With two classes this is half an image right and half an image wrong, as in
Jeffreys' estimate of a rate.

Source: arXiv:2202.10054, section 3; for the added image, Platt, "Probabilistic
outputs for support vector machines" (1999), section 2.2.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float32, Float64, Integer, Num

from vit_jax import ridge, run_summary
from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import note
from vit_jax.checkpointing.checkpointer import load_params, write_params
from vit_jax.config import HELD_OUT, json_file
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.evaluators.features import extract, features_fn
from vit_jax.experiment import Experiment
from vit_jax.finetune import lora, results
from vit_jax.losses import balanced_weights
from vit_jax.paths import run_path
from vit_jax.step import EMA, TrainState
from vit_jax.trainable import saved_params
from vit_jax.writers import run_info

FOLDER = "probe"  # folder in the workdir: the model with the probe as head

L2S = tuple(4.0**k for k in range(9))  # 1 to 65,536
SCALES = tuple(2.0**k for k in range(-2, 8))
# Weights of the fine-tuned model in the mean that is saved.
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# With fewer held-out images, an accuracy of 90 % has a standard error above
# 4 %.
FEW = 50


@dataclasses.dataclass(frozen=True)
class FittedHead:
  """A head that reads frozen features.

  kernel, bias: Parameters of the head.
  l2: Its penalty.
  scale: Factor between ridge scores, whose targets are -1 and 1, and logits.
  num_held_out: Number of held-out images.
  accuracy: Share of held-out images that are predicted right, 0 to 1.
  loss: Mean loss of the held-out images with the added image, weighted by
    class if the run's loss is.
  """

  kernel: Float32[np.ndarray, "d classes"]
  bias: Float32[np.ndarray, " classes"]
  l2: float
  scale: float
  num_held_out: int
  accuracy: float
  loss: float

  def __str__(self) -> str:
    n = self.num_held_out
    few = ""
    if n < FEW:
      few = f" (one image is {1 / n:.1%}: too few for a reliable choice)"
    return (
      f"{self.accuracy:.2%} of the {n:,} held-out images right{few}, L2"
      f" {self.l2:,g}; training starts from this head"
    )


class LinearProbe(Callback):
  """Begins with a linear probe as head, and chooses the model that is saved.

  Args:
    experiment: The run.
    evaluators: Its evaluators.
  """

  def __init__(self, experiment: Experiment, evaluators: Sequence[Evaluator]):
    self._experiment, self._evaluators = experiment, evaluators

  def initial_state(self, state: TrainState) -> TrainState:
    """Returns the state with the probe as head; writes the probe."""
    state, probe = start(self._experiment, self._evaluators, state)
    note(f"probe       {probe}")
    return state

  def final_state(self, step: int, state: TrainState) -> TrainState:
    """Returns the fine-tuned model, the probe, or a mean of both."""
    workdir = self._experiment.workdir
    state, text = best(workdir, self._evaluators, state)
    note(f"saved       {text}")
    return state


def start(
  experiment: Experiment, evaluators: Sequence[Evaluator], state: TrainState
) -> tuple[TrainState, FittedHead]:
  """Returns a state whose head is a linear probe. Collective.

  The probe is also written to `FOLDER`, as a model that `vit_jax.load` reads.

  Args:
    experiment: The run, with the training data of config.data.
    evaluators: Evaluators of the run; `val` has the held-out images, and the
      preprocessing without augmentation.
    state: A state at step 0.

  Raises:
    DataError: See `extract`.
    OSError: The probe cannot be written.
  """
  context = _held_out(evaluators).context
  fn = features_fn(context, ("pre_logits",))
  rows, held_out = (
    extract(context, source, fn, state.model_params)
    for source in (experiment.data.source, context.sources["split"])
  )
  probe = fit(
    rows["x"],
    rows["label"],
    held_out["x"],
    held_out["label"],
    experiment.run_shape.num_classes,
    _class_weights(experiment),
  )
  # Both heads of a distilled model get the probe; the average of their logits
  # equals the probe on the averaged token.
  model = experiment.config.model
  heads = {
    path: probe.kernel if path.endswith("/kernel") else probe.bias
    for path in flatten_dict(state.params, sep="/")
    if model.is_head(path)
  }
  state = state.with_params(heads)
  folder = run_path(experiment.workdir) / FOLDER
  if jax.process_index() == 0:  # left by a run that ended before its checkpoint
    folder.rmtree(missing_ok=True)
  # No process writes before process 0 has removed the old folder.
  multihost_utils.sync_global_devices("probe removed")
  metadata = run_summary.metadata(experiment, state)
  saved = saved_params(state.params, state.fixed)
  write_params(str(folder), saved, metadata)
  _write(experiment.workdir, results.ProbeOutcome(probe.accuracy, probe.l2))
  return state, probe


def best(
  workdir: str, evaluators: Sequence[Evaluator], state: TrainState
) -> tuple[TrainState, str]:
  """Returns the best mean of the probe and the fine-tuned model. Collective.

  The parameters of the mean are `(1 - w) probe + w fine_tuned`, with a `w` of
  `WEIGHTS`, which `choose` chooses on the held-out images. If the loss weights
  the classes, the balanced accuracy is compared.

  Source: arXiv:2109.01903, section 3, for a zero-shot and a fine-tuned model.
  Measured: docs/tasks/finetune.md.

  Args:
    workdir: Folder of the run.
    evaluators: Evaluators of the run.
    state: The fine-tuned state.

  Returns:
    A state with the parameters of the mean, and a line that says what it is.

  Raises:
    OSError, ValueError: A file of the probe cannot be read or written, or is
      damaged.
  """
  evaluator = _held_out(evaluators)
  params, _ = load_params(str(run_path(workdir) / FOLDER))
  begun = state.with_params(params)
  hits = [evaluator.hits(_mean(begun, state, w).eval_params) for w in WEIGHTS]
  is_right = np.stack([h["is_right"] for h in hits])
  labels = hits[0]["label"]
  shares = np.full(len(labels), 1 / len(labels))
  counts = np.bincount(labels)
  balanced_shares = 1 / (np.count_nonzero(counts) * counts[labels])
  is_balanced = evaluator.context.config.objective.counts_classes
  weight = choose(is_right, balanced_shares if is_balanced else shares)
  chosen = WEIGHTS.index(weight)
  top1, balanced = ((is_right @ x).tolist() for x in (shares, balanced_shares))
  outcome = dataclasses.replace(
    json_file.read_as(
      results.ProbeOutcome, run_path(workdir) / results.LINEAR_PROBE
    ),
    fine_tuned=top1[-1],
    saved=top1[chosen],
    weight=weight,
  )
  if is_balanced:
    outcome = dataclasses.replace(
      outcome,
      balanced=balanced[0],
      fine_tuned_balanced=balanced[-1],
      saved_balanced=balanced[chosen],
    )
  _write(workdir, outcome)
  return _mean(begun, state, weight), _text(outcome)


def choose(
  is_right: Bool[np.ndarray, "models images"],
  shares: Float64[np.ndarray, " images"],
) -> float:
  """Returns the weight of the fine-tuned model in the mean that is saved.

  A mean is left out if another one is better by more than a standard error. Of
  the others, the one whose weight is nearest to 0.5 is chosen (0.75 before
  0.25): smaller differences may be chance, and 0.5 is what the source of `best`
  recommends without other knowledge.

  The accuracies of two models on the same images differ by `sum_i s_i d_i`,
  where `d_i` is 1 (-1) if only the first (second) model is right on image i. If
  both are equally good, the standard error is `sqrt(sum_i (s_i d_i)^2)`. With
  equal shares, a model that is wrong on b images on which the other is right,
  and right on c on which the other is wrong, is left out if `b - c > sqrt(b +
  c)`. So one image alone decides nothing, whatever its class weighs.

  Args:
    is_right: Whether the mean with each of `WEIGHTS` is right on each image.
    shares: Share of each image in the accuracy; their sum is 1.

  Source: McNemar, Psychometrika 12 (1947), for the standard error.

  Example:
    >>> is_right = np.ones((5, 4), bool)
    >>> is_right[2, :2] = False  # the mean with the weight 0.5, on two images
    >>> choose(is_right, np.full(4, 0.25))
    0.75
  """
  # [i, j]: how much model i exceeds model j, image by image.
  gains = shares * (is_right[:, None] * 1.0 - is_right)
  errors = np.sqrt((gains**2).sum(-1))
  exceeds = gains.sum(-1) > errors + 1e-9  # for the rounding of floats
  left = [w for w, out in zip(WEIGHTS, exceeds.any(0), strict=True) if not out]
  return min(left, key=lambda w: (abs(w - 0.5), -w))


def _mean(begun: TrainState, tuned: TrainState, weight: float) -> TrainState:
  """Returns a state with the weighted mean of the models of two states.

  A model with adapters has the kernels W + s A B, and B of the probe is 0. With
  the fine-tuned A and the mean of both B, the kernels are the mean.
  """
  if weight in (0, 1):  # exact, and the probe if the other is not finite
    return tuned if weight else begun
  fine_tuned = tuned.averages.get(EMA, tuned.params)

  def mean(path, p, q):
    return q if path[-1].key == lora.A else p + weight * (q - p)

  params = jax.tree_util.tree_map_with_path(mean, begun.params, fine_tuned)
  return tuned.replace(
    params=params, averages=dict.fromkeys(tuned.averages, params)
  )


def _text(outcome: results.ProbeOutcome) -> str:
  """Returns which model is saved, and the scores of all."""
  others = {
    "linear probe": (outcome.top1, outcome.balanced),
    "fine-tuned model": (outcome.fine_tuned, outcome.fine_tuned_balanced),
  }
  others = {
    k: v for k, v in others.items() if f"the {k}" != outcome.saved_model
  }

  def scores(index):
    return "".join(f", {k} {v[index]:.2%}" for k, v in others.items())

  text = (
    f"{outcome.saved_model}: top-1 {outcome.saved:.2%} on held-out images"
    + scores(0)
  )
  if outcome.balanced is not None:
    text += f"; balanced accuracy {outcome.saved_balanced:.2%}" + scores(1)
  return text


def _class_weights(experiment: Experiment) -> np.ndarray | None:
  """Returns the weights of the classes in the loss, or None."""
  if not experiment.config.objective.counts_classes:
    return None
  if not (counts := experiment.class_counts):
    return None
  weights_ = balanced_weights(counts, experiment.run_shape.num_classes)
  return np.asarray(weights_, np.float64)


def _write(workdir: str, outcome: results.ProbeOutcome) -> None:
  run_info.write_json(
    workdir, results.LINEAR_PROBE, dataclasses.asdict(outcome)
  )


def _held_out(evaluators: Sequence[Evaluator]) -> Evaluator:
  (evaluator,) = (e for e in evaluators if e.config.name == HELD_OUT)
  return evaluator


def fit(
  features: Num[np.ndarray, "n d"],
  labels: Integer[np.ndarray, " n"],
  held_out: Num[np.ndarray, "m d"],
  held_out_labels: Integer[np.ndarray, " m"],
  num_classes: int,
  class_weights: Float64[np.ndarray, " classes"] | None = None,
) -> FittedHead:
  """Fits a head on some images, and chooses penalty and scale on others.

  The chosen penalty has the highest accuracy, among equal ones the lowest loss.
  The chosen scale has the lowest loss. The loss is the one above, with an added
  image. All of them weight an image by its class.

  Args:
    features: Features of the images to fit on.
    labels: Their classes, 0 to num_classes - 1.
    held_out: Features of the images for the choice.
    held_out_labels: Their classes.
    num_classes: Columns of the head.
    class_weights: Weight of each class; None for 1.

  Raises:
    ValueError: See `ridge.fit`.

  Example:
    >>> x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    >>> y = np.array([0, 0, 1, 1])
    >>> probe = fit(x, y, x, y, num_classes=2)
    >>> probe.accuracy, (x @ probe.kernel + probe.bias).argmax(-1).tolist()
    (1.0, [0, 0, 1, 1])
  """
  of_held_out = np.ones(len(held_out_labels))
  if class_weights is not None:
    of_held_out = class_weights[held_out_labels]
  # The number of images; with weights, as many as have the same variance.
  num = of_held_out.sum() ** 2 / (of_held_out**2).sum()
  fits = ridge.fit(features, labels, num_classes, L2S, class_weights)
  best = best_key = None
  for l2, fitted in zip(L2S, fits, strict=True):
    kernel, bias = _kernel_and_bias(fitted)
    scores = held_out.astype(np.float64) @ kernel + bias
    is_right = scores.argmax(-1) == held_out_labels
    losses = [
      _cross_entropy(s * scores, held_out_labels, of_held_out, 1 / (num + 1))
      for s in SCALES
    ]
    loss, scale = min(zip(losses, SCALES, strict=True))
    key = (-np.sum(of_held_out * is_right), loss)
    if best is None or key < best_key:
      best_key = key
      best = FittedHead(
        (scale * kernel).astype(np.float32),
        (scale * bias).astype(np.float32),
        l2,
        scale,
        len(held_out_labels),
        float(np.mean(is_right)),
        loss,
      )
  return best


def _kernel_and_bias(
  fitted: ridge.Ridge,
) -> tuple[Float64[np.ndarray, "d classes"], Float64[np.ndarray, " classes"]]:
  """Returns the classifier as one affine map of features, in float64."""
  kernel = fitted.weights[:-1] / fitted.std[:, None]
  return kernel, ridge.BIAS * fitted.weights[-1] - fitted.mean @ kernel


def _cross_entropy(
  logits: Float64[np.ndarray, "m classes"],
  labels: Integer[np.ndarray, " m"],
  image_weights: Float64[np.ndarray, " m"],
  smoothing: float,
) -> float:
  """Returns the weighted mean loss; `smoothing` is the share of all classes."""
  logits = logits - logits.max(-1, keepdims=True)
  of_label = logits[np.arange(len(labels)), labels]
  targets = (1 - smoothing) * of_label + smoothing * logits.mean(-1)
  losses = np.log(np.exp(logits).sum(-1)) - targets
  return float(np.mean(image_weights * losses))
