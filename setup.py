"""The packages, of which one is elsewhere; pyproject.toml says the rest."""

import sys

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["vit_jax*"])
package_dir = {"": "."}
# A wheel holds configs/ as vit_jax.configs. An editable install finds it in the
# checkout: with a second folder setuptools would write an import hook, which a
# folder vit_jax where Python starts, as a clone is, would come before.
if "editable_wheel" not in sys.argv:
  packages.append("vit_jax.configs")
  package_dir["vit_jax.configs"] = "configs"

setup(packages=packages, package_dir=package_dir)
