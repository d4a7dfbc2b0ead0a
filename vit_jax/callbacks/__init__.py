"""Callbacks: what happens around the steps of a run, one file each."""

from vit_jax.callbacks.base import Callback, CallbackList, Stop

__all__ = ("Callback", "CallbackList", "Stop")
