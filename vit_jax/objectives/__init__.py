"""What a run learns: every objective by the name in `config.objective.kind`.

An objective is a frozen dataclass of its own options, with two methods.
`faults()` yields the faults that the options alone show, one text each.
`make(model, facts)` takes config.model and `step.Facts`, and returns

  module: What is trained, a `flax.linen.Module`. Called on images [b, h, w, c]
    in [-1, 1] it returns (logits, out), as every model does; its `init` on such
    images makes all parameters.
  loss_fn: (params, batch, rng) -> (sum, count, named): the loss summed over
    what counts in the rows of a batch, how much counts, and further sums to
    log by name, each a float32 scalar. The step adds them up over microbatches
    and devices and divides by the count. So the loss of a row must not depend
    on other rows, and random numbers must follow from `rng`, the key of the
    step, and the record's number batch["index"], not from the row's place.

jax and flax are imported by `make`, not by these files, so that `--help` need
not wait for them.
"""

from vit_jax.objectives.classification import Classification

OBJECTIVES = {"classification": Classification}

Objective = Classification
