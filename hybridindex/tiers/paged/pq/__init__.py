"""Scans of product-quantized rows in pages."""
