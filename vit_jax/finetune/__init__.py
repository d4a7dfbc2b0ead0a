"""Fine-tuning on own images: linear probe, trials, adapters, frozen layers."""
