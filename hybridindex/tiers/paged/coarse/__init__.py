"""Coarse quantization on a device."""
