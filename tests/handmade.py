"""Records, logits and features written by hand, for tests of evaluators."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import tiny

from vit_jax import class_names, sharding
from vit_jax.data.source import Source
from vit_jax.data.tf_cpu import tf
from vit_jax.eval_context import RunContext

OPS = "decode|resize(4)"
NO_HEAD = class_names.Head(0)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Records(Source):
  """Images whose every pixel is the number of the record, modulo 256.

  The green channel counts the 256s.
  """

  table: np.ndarray

  def load(self, raw):
    index = raw["index"]
    pixel = tf.stack([index % 256, index // 256, index * 0])
    image = tf.broadcast_to(tf.cast(pixel, tf.uint8), [4, 4, 3])
    label = tf.gather(tf.constant(self.table), index)
    label = tf.cast(label, self.label_spec.dtype)
    return {"image": image, "label": label, "index": index}

  def labels(self):
    return self.table


def records(labels, num_classes=None, name="handmade", names=None) -> Records:
  """Returns records with these labels: [n], or [n, classes]."""
  labels = np.asarray(labels)
  several = labels.ndim == 2
  if num_classes is None:
    num_classes = labels.shape[1] if several else int(labels.max()) + 1
  return Records(
    name=name,
    split="test",
    num_examples=len(labels),
    num_classes=num_classes,
    class_names=names,
    is_multilabel=several,
    table=labels,
  )


def numbers(images):
  """Returns the numbers of the records that the images are of."""
  return images[:, 0, 0, 0].astype(int) + 256 * images[:, 0, 0, 1].astype(int)


def context(
  options, sources, head=0, names=None, *, workdir=None, **changes: Any
) -> RunContext:
  """Returns the context of a model that looks its answers up.

  Its parameters have the answers by the number of the record: "logits" [n,
  head], "features" [n, d], "tokens" [n, tokens, d], or several.
  """

  def predict(params, images):
    rows = numbers(images)
    answers = {k: jnp.take(v, rows, 0, mode="wrap") for k, v in params.items()}
    out = {
      "pre_logits": answers.get("features"),
      "encoded": answers.get("tokens"),
    }
    return answers.get("logits"), out

  config = tiny.config(**changes)
  if not isinstance(sources, dict):
    sources = {"split": sources}
  return RunContext(
    options=dataclasses.replace(
      options, ops=OPS, batch_size=options.batch_size or 8, dataset="handmade"
    ),
    config=config,
    sources=sources,
    predict=predict,
    mesh=sharding.make_mesh(config.mesh),
    random_params=lambda: None,
    head=class_names.Head(head, names),
    workdir=workdir,
  )
