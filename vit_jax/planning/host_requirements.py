"""Cores that hosts need so that no chip waits for images."""

import math
from typing import Any

from vit_jax.config import Config
from vit_jax.data import dataset_info

# Images per second of one core in use, from JPEGs like those of ImageNet to
# batches of 224 px: docs/receipts.jsonl, "input_quiet". Two rates, measured in
# turns; other operations cost little beside these.
RATES = {
  "decode_inception_crop(224)|flip_lr": 1263.0,
  "decode_inception_crop(224)|flip_lr|randaug(2, 15)": 807.0,
}
MACHINE = "AMD EPYC (Zen 4)"
# vCPUs (hardware threads, two to a core) of a host with four chips. Source: the
# pages of cloud.google.com/tpu/docs on v5e and TPU7x, which has the other two
# as well; for other chips none is stated here.
VCPUS = {"v5e": 112, "v5p": 208, "v6e": 180, "tpu7x": 224}


def rate(config: Config) -> tuple[float | None, str]:
  """Returns images per second of a core, and what they were measured with.

  Returns:
    (None, reason) for images that are no JPEGs: no rate was measured.
  """
  known = dataset_info.lookup(config.data.dataset)
  if known and known.image != "jpeg":
    return None, f"no rate is measured for {known.image}; give --input_rate"
  plain, augmented = RATES
  ops = augmented if "randaug" in config.data.ops else plain
  return RATES[ops], f"as measured with {ops} on {MACHINE}"


def needs(
  config: Config,
  images_per_second: float,
  num_hosts: int,
  generation: str,
  input_rate: float | None = None,
) -> dict[str, Any]:
  """Returns the cores that a host needs so that no chip waits for images.

  Args:
    config: The run.
    images_per_second: Rate of the whole slice.
    num_hosts: Number of hosts, each of which reads its share.
    generation: Kind of chip, such as "v5e".
    input_rate: Images per second of one core; None: see `rate`.

  Returns:
    hosts; input_per_host: images per second; input_rate and input_rate_of: of a
    core, and what it was measured with; input_cores: of each host, whole ones;
    host_vcpus. Rate and cores, and vCPUs, are None where they are not known.
  """
  core_rate, source = (input_rate, "as given") if input_rate else rate(config)
  per_host = images_per_second / num_hosts
  return {
    "hosts": num_hosts,
    "input_per_host": per_host,
    "input_rate": core_rate,
    "input_rate_of": source,
    "input_cores": core_rate and math.ceil(per_host / core_rate),
    "host_vcpus": VCPUS.get(generation),
  }
