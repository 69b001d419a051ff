"""A small HTTP server on loopback that stands in for an LLM server: well-behaved by default, hostile where told.

The good path is also tested on a real vLLM: tests/vllm.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_memory_bytes="67108864",kv_cache_size_tokens="16384"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double: LLMDouble

    def log_message(self, *_words: object) -> None:
        pass

    def do_GET(self) -> None:
        self.double.serve(self, b"")

    def do_POST(self) -> None:
        self.double.serve(self, self.rfile.read(int(self.headers["content-length"])))

    def answer(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        """The rest of the connection is the body."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True


Route = Callable[[Handler, bytes], None]


class LLMDouble:
    """Counts words as tokens. ``routes`` replaces what a path answers."""

    def __init__(self, routes: dict[str, Route] | None = None) -> None:
        self.routes: dict[str, Route] = {
            "/v1/models": lambda h, _: h.answer(b'{"object": "list", "data": [{"id": "tiny", "max_model_len": 2048}]}'),
            "/metrics": lambda h, _: h.answer(METRICS.encode(), kind="text/plain"),
            "/v1/completions": self.complete,
            "/v1/embeddings": self.embed,
            **(routes or {}),
        }
        #: Bodies of completions, as they came.
        self.completions: list[dict[str, object]] = []
        #: Bodies of requests for embeddings, and their headers.
        self.embeddings: list[tuple[dict[str, Any], dict[str, str]]] = []
        #: (n, d) vectors of texts; what the double answers to these requests.
        self.vectors_of: Callable[[list[str]], Any] = lambda texts: [[len(text), 1.0] for text in texts]
        self.largest_crowd = 0
        self._crowd = 0
        self._lock = threading.Lock()
        #: Set when the double closes: routes that stall wait for it.
        self.closing = threading.Event()
        handler = type("BoundHandler", (Handler,), {"double": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def serve(self, handler: Handler, body: bytes) -> None:
        route = self.routes.get(handler.path)
        try:
            if route is None:
                handler.answer(b'{"detail": "Not Found"}', 404)
            else:
                route(handler, body)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def complete(self, handler: Handler, body: bytes) -> None:
        asked = json.loads(body)
        with self._lock:
            self.completions.append(asked)
            self._crowd += 1
            self.largest_crowd = max(self.largest_crowd, self._crowd)
        try:
            n_in, n_out = len(asked["prompt"].split()), asked["max_tokens"]
            usage = {"prompt_tokens": n_in, "completion_tokens": n_out}
            if not asked.get("stream"):
                handler.answer(json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode())
                return
            handler.begin_stream()
            for i in range(n_out):
                reason = "length" if i == n_out - 1 else None
                event = {"choices": [{"text": " a", "finish_reason": reason}]}
                handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            if "stream_options" in asked:
                handler.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            handler.wfile.write(b"data: [DONE]\n\n")
        finally:
            with self._lock:
                self._crowd -= 1

    def embed(self, handler: Handler, body: bytes) -> None:
        asked = json.loads(body)
        with self._lock:
            self.embeddings.append((asked, dict(handler.headers.items())))
        vectors = [[float(value) for value in vector] for vector in self.vectors_of(asked["input"])]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        # In another order than they were asked for.
        handler.answer(json.dumps({"object": "list", "model": asked["model"], "data": data[::-1]}).encode())

    def __enter__(self) -> LLMDouble:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
