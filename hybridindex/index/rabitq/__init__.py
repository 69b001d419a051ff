"""RaBitQ codes beside the rows of an index: a few bits a dimension that estimate distances. Numbers and files; no
faiss. The extension computes the same, bit for bit; what is here is its reference.

The arithmetic, all in float32 and in this order: docs/index-format.md.
"""
