"""Profiles of chips, servers and models, for studies of machines other than this one.

One JSON file each beside this file; every number has a unit, a source and a date. Users' files have the same format.
Measured profiles (:mod:`hybridindex.profiler`) override them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError

__all__ = [
    "Chip",
    "Model",
    "Server",
    "chip",
    "chip_from",
    "model",
    "model_from",
    "names",
    "read_small_file",
    "server",
    "server_from",
]

#: Unit -> (what it measures, factor to the base unit).
_UNITS: dict[str, tuple[str, float]] = {
    "FLOP/s": ("FLOP/s", 1.0),
    "GFLOP/s": ("FLOP/s", 1e9),
    "TFLOP/s": ("FLOP/s", 1e12),
    "B": ("B", 1.0),
    "GB": ("B", 1e9),
    "GiB": ("B", 2.0**30),
    "B/s": ("B/s", 1.0),
    "GB/s": ("B/s", 1e9),
    "TB/s": ("B/s", 1e12),
    "parameters": ("parameters", 1.0),
    "count": ("count", 1.0),
}
_MAX_FILE_BYTES = 1 << 16
#: Largest number in a profile, in any unit.
_MOST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """An accelerator, with its peak rates; real kernels do not reach them."""

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    #: Between two chips of one pod or board, one direction.
    link_bytes_per_s: float
    #: From the host, one direction.
    host_bytes_per_s: float
    #: Field -> where its number comes from, with the date.
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A host that scans lists, and the chips in it."""

    name: str
    cores: int
    memory_bytes: float
    memory_bytes_per_s: float
    #: Bytes of product-quantized codes that one core scans per second from its caches.
    scan_bytes_per_core_s: float
    chips: int
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer, as rooflines need it."""

    name: str
    #: Weights that every token uses.
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    #: False: an encoder; it has no KV cache and no decoding.
    generates: bool
    sources: Mapping[str, str]

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Bytes of the keys and values of one token in all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def weight_bytes(self, bytes_per_parameter: float = 1.0) -> float:
        """Bytes of all weights."""
        return self.parameters * bytes_per_parameter


#: End of a field's name -> what it measures; the first that fits, else a count.
_MEASURES = {"flops_per_s": "FLOP/s", "_s": "B/s", "_bytes": "B", "parameters": "parameters", "": "count"}


def names(kind: str) -> list[str]:
    """Names of the shipped profiles; ``kind`` is "chips", "servers" or "models"."""
    return sorted(file.name.removesuffix(".json") for file in _folder(kind).iterdir() if file.name.endswith(".json"))


def chip(name: str) -> Chip:
    """A shipped chip by name, or one from a file where ``name`` is a path that ends in ``.json``."""
    return chip_from(_load("chips", name))


def server(name: str) -> Server:
    """A shipped server by name, or one from a file."""
    return server_from(_load("servers", name))


def model(name: str) -> Model:
    """A shipped model by name, or one from a file."""
    return model_from(_load("models", name))


def chip_from(data: Mapping[str, Any]) -> Chip:
    """A chip from the content of its file.

    Raises:
        InvalidInputError: a field is missing, unknown, without unit, or not positive; it is named.
    """
    name, values, sources = _quantities(data, Chip)
    return Chip(name=name, sources=sources, **values)


def server_from(data: Mapping[str, Any]) -> Server:
    """A server from the content of its file. Raises like :func:`chip_from`."""
    name, values, sources = _quantities(data, Server)
    return replace(
        Server(name=name, sources=sources, **values),  # type: ignore[arg-type]
        cores=int(values["cores"]),
        chips=int(values["chips"]),
    )


def model_from(data: Mapping[str, Any]) -> Model:
    """A model from the content of its file. Raises like :func:`chip_from`."""
    known = dict(data)
    generates = known.pop("generates", True)
    if not isinstance(generates, bool):
        raise InvalidInputError(f"model {data.get('name')}: generates is {generates!r}; expected true or false")
    name, values, sources = _quantities(known, Model)
    whole = {field: int(value) for field, value in values.items() if field != "parameters"}
    return Model(name=name, parameters=values["parameters"], generates=generates, sources=sources, **whole)


def _folder(kind: str) -> Any:
    return resources.files(__name__).joinpath(kind)


def read_small_file(path: Path, expected: str) -> bytes:
    """The content of a user's file.

    Raises:
        InvalidInputError: it cannot be read, or is larger than 64 KiB; says what was ``expected``.
    """
    try:
        with filesystem.open_for_reading(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidInputError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; expected {expected}")
    return content


def _load(kind: str, name: str) -> Mapping[str, Any]:
    if name.endswith(".json"):
        text = read_small_file(Path(name), f"a profile of {kind}")
    elif name in names(kind):
        text = _folder(kind).joinpath(f"{name}.json").read_bytes()
    else:
        raise InvalidInputError(
            f"{kind.removesuffix('s')} is {name[:80]!r}; expected one of {', '.join(names(kind))}, or a file FILE.json"
        )
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInputError(f"{name} holds no object; expected fields with units")
    return data


def _quantities(
    data: Mapping[str, Any], cls: type[Chip | Server | Model]
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Name, values in base units and sources of the numeric fields of ``cls``."""
    kind = cls.__name__.lower()
    known = [f.name for f in fields(cls) if f.name not in ("name", "sources", "generates")]
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"{kind} has no name; expected a string")
    if unknown := sorted(set(data) - {"name", "notes", *known}):
        raise InvalidInputError(f"{kind} {name}: {unknown[0]} is not a field; expected {', '.join(known)}")
    values, sources = {}, {}
    for field in known:
        measures = next(what for end, what in _MEASURES.items() if field.endswith(end))
        values[field], sources[field] = _quantity(data.get(field), f"{kind} {name}: {field}", measures)
    return name, values, sources


def _quantity(given: Any, where: str, measures: str) -> tuple[float, str]:
    expected = ", ".join(unit for unit, (what, _) in _UNITS.items() if what == measures)
    if not isinstance(given, dict):
        raise InvalidInputError(f"{where} is {reprlib.repr(given)}; expected value, unit ({expected}), source and date")
    unit = given.get("unit")
    if not isinstance(unit, str) or unit not in _UNITS or _UNITS[unit][0] != measures:
        raise InvalidInputError(f"{where} has unit {reprlib.repr(unit)}; expected {expected}")
    value = given.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise InvalidInputError(f"{where} has value {reprlib.repr(value)}; expected a positive number of {unit}")
    if measures == "count" and value != int(value):
        raise InvalidInputError(f"{where} has value {value!r}; expected a whole number")
    for field in ("source", "date"):
        if not isinstance(given.get(field), str) or not given[field]:
            raise InvalidInputError(f"{where} has no {field}; say where and when the number was found")
    return float(value) * _UNITS[unit][1], f"{given['source']} ({given['date']})"
