"""Product-quantized rows: how they lie in pages, and how far they are from queries."""
