"""The files of the page with the headers that they are served with. What they show is in the files themselves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.resources import files

__all__ = ["PAGE_FILES", "PAGE_PATHS", "PageFile"]

#: Only our own script, style, picture and data; in no frame; and nothing that a page could be made to send elsewhere.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file of the bundle."""

    path: str
    name: str
    media_type: str
    body: bytes = field(init=False, repr=False)
    etag: str = field(init=False)

    def __post_init__(self) -> None:
        body = files("hybridindex.service.http.page").joinpath(self.name).read_bytes()
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "etag", f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def headers(self) -> dict[str, str]:
        """For 200 and 304 alike. Kept by browsers and asked for anew each time: names carry no version."""
        return {
            "etag": self.etag,
            "cache-control": "no-cache",
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }

    def unchanged(self, if_none_match: str | None) -> bool:
        """Whether a browser's copy is this file (RFC 9110, 13.1.2: a weak comparison)."""
        tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
        return self.etag in tags or tags == ["*"]


#: Read once, at the import of the application.
PAGE_FILES = (
    PageFile(path="/", name="index.html", media_type="text/html; charset=utf-8"),
    PageFile(path="/page.css", name="page.css", media_type="text/css; charset=utf-8"),
    PageFile(path="/page.js", name="page.js", media_type="text/javascript; charset=utf-8"),
    PageFile(path="/charts.js", name="charts.js", media_type="text/javascript; charset=utf-8"),
    PageFile(path="/docs", name="docs.html", media_type="text/html; charset=utf-8"),
    PageFile(path="/docs.js", name="docs.js", media_type="text/javascript; charset=utf-8"),
    PageFile(path="/icon.svg", name="icon.svg", media_type="image/svg+xml"),
)
PAGE_PATHS = frozenset(file.path for file in PAGE_FILES)
