"""Runs that the tests of this folder share."""

from shared_runs import run  # noqa: F401
