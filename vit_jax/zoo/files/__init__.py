"""Weights in the files of timm, transformers, OpenCLIP, Meta and peft."""
