"""Clients of the daemon, blocking and asynchronous. Need the ``client`` extra (httpx) when one is made.

::

    from hybridindex.client import Client

    with Client("http://127.0.0.1:8080", key=key) as client:
        result = client.search(queries, k=10)
        with client.session(window_ms=300) as session:
            session.lookahead(draft)
            result = session.search(query, k=3, deadline_ms=40, min_nprobe=16)
"""

from hybridindex.client.async_client import AsyncClient, AsyncRemoteSession
from hybridindex.client.client import Client, RemoteSession
from hybridindex.client.retry import RetryPolicy

__all__ = ["AsyncClient", "AsyncRemoteSession", "Client", "RemoteSession", "RetryPolicy"]
