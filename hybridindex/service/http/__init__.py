"""The daemon's HTTP interface. Needs the extra ``service``."""

from hybridindex.errors import MissingDependencyError

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("the daemon needs FastAPI: pip install 'hybridindex[service]'") from error
