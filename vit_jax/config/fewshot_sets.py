"""The data sets of a few-shot score, and their evaluators."""

from typing import Any

# Data set -> (split the shots are drawn from, split that is scored). They are
# big_vision's (configs/common_fewshot.py); at least 30 images of every class of
# ImageNet are among the first 65,000.
FEWSHOT_SETS = {
  "caltech101": ("train", "test"),
  "cars196": ("train", "test"),
  "cifar100": ("train", "test"),
  "dtd": ("train", "test"),
  "oxford_iiit_pet": ("train", "test"),
  "uc_merced": ("train[:1000]", "train[1000:]"),
  "imagenet2012": ("train[:65000]", "validation"),
}


def fewshot_evals(**options: Any) -> dict[str, dict[str, Any]]:
  """Returns an evaluator "fewshot_<data set>" for each of `FEWSHOT_SETS`.

  All are in the group "fewshot", whose mean is written, too.

  Args:
    **options: Options of each.
  """
  return {
    f"fewshot_{dataset}": {
      "kind": "fewshot",
      "dataset": dataset,
      "train_split": support,
      "split": test,
      "group": "fewshot",
      **options,
    }
    for dataset, (support, test) in FEWSHOT_SETS.items()
  }
