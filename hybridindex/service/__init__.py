"""The daemon around a router: HTTP, admission, sessions, keys, metrics, the process.

``http``, ``observe`` and ``daemon`` need the extra ``service``. Imports go ``daemon``, ``http``, ``observe``, the rest.
"""
