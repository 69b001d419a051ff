"""The daemon around a router: HTTP, admission, sessions, keys, metrics, its process.

Where it speaks HTTP (``http``, ``observe``, ``daemon``) it needs the ``service`` extra; the rest needs the core.
Searching, planning and moving lists belong to the rooms below.
"""
