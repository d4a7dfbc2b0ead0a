"""What a run needs beside its chips: cores of the hosts, and money."""

import math
import re
from typing import Any

from vit_jax.config import Config
from vit_jax.data import facts

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

_PRICE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(\D*)")


def rate(config: Config) -> tuple[float | None, str]:
  """Returns images per second of a core, and what they were measured with.

  Returns:
    (None, reason) for images that are no JPEGs: no rate was measured.
  """
  known = facts.known(config.data.dataset)
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
    images_per_second: Of the whole slice.
    num_hosts: Hosts, each of which reads its share.
    generation: Kind of chip, such as "v5e".
    input_rate: Images per second of one core; None: see `rate`.

  Returns:
    hosts; input_per_host: images per second; input_rate and input_rate_of: of a
    core, and what it was measured with; input_cores: of each host, whole ones;
    host_vcpus. Rate and cores, and vCPUs, are None where they are not known.
  """
  found, of = (input_rate, "as given") if input_rate else rate(config)
  per_host = images_per_second / num_hosts
  return {
    "hosts": num_hosts,
    "input_per_host": per_host,
    "input_rate": found,
    "input_rate_of": of,
    "input_cores": found and math.ceil(per_host / found),
    "host_vcpus": VCPUS.get(generation),
  }


def price(text: str) -> tuple[float, str]:
  """Returns the number and the unit of a price.

  Example:
    >>> price("1.2"), price("1.20 USD"), price(".5€")
    ((1.2, ''), (1.2, 'USD'), (0.5, '€'))

  Raises:
    ValueError: It does not begin with a number.
  """
  match = _PRICE.fullmatch(text)
  if not match:
    raise ValueError(
      f"--price_per_chip_hour: got {text!r}, expected a number, and the unit"
      " behind it if it has one, such as 1.20USD."
    )
  return float(match[1]), match[2].strip()


def positive(flag: str, text: str) -> float:
  """Returns the number of a flag.

  Raises:
    ValueError: It is none above 0.
  """
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not 0 < value < math.inf:
    raise ValueError(f"--{flag}: got {text!r}, expected a number above 0.")
  return value


def rows(found: dict[str, Any]) -> dict[str, str]:
  """Returns the lines of the planner's table, by what they are about."""
  num_hosts, cores = found["hosts"], found["input_cores"]
  on = "one host" if num_hosts == 1 else f"each of {num_hosts} hosts"
  text = f"{found['input_per_host']:,.0f} images/s on {on}"
  if cores:
    text += f": {cores:,} core{'s' * (cores > 1)} at"
    text += f" {found['input_rate']:,.0f} a core, {found['input_rate_of']}"
    if vcpus := found["host_vcpus"]:
      there = vcpus // 2
      excess = ", fewer than needed" if cores > there else ""
      text += (
        f"; a host of four chips has {vcpus} vCPUs ({there} cores){excess}"
      )
  else:
    text += f"; {found['input_rate_of']}"
  lines = {"input": text}
  if found["price"] is not None:
    unit = found["price_unit"]
    hour = f"{found['price_per_chip_hour']:g} {unit}".rstrip()
    total = f"{found['price']:,.2f} {unit}".rstrip()
    lines["price"] = f"{total} at {hour} a chip and hour, an estimate"
  return lines
