"""The daemon's HTTP interface. Needs the extra ``service``."""

from hybridindex.errors import MissingDependencyError, how_to_install

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"the daemon needs FastAPI: {how_to_install('service')}") from error
