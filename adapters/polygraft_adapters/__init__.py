"""PEFT folders to checked, immutable adapter weights."""
