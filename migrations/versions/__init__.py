"""One module per schema version, ``NNNN_what_changed.py``."""
