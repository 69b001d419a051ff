"""What mkdocs runs: pages get what comes from the code, commands from the command line and routes from the OpenAPI
document of the application; and links that leave docs/ lose their targets, as the site has no place for these."""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer

import hybridindex as hx
from hybridindex.cli.main import make_app
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.http.app import create_app

__all__ = ["PARTS", "leaves", "on_page_content", "on_page_markdown", "openapi"]

_DOCS = Path(__file__).resolve().parent
_MARK = re.compile(r"^<!-- reference: (\w+) -->$", flags=re.M)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def _line(text: str | None) -> str:
    """As one cell of a table."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(each)} |" for each in (head, tuple("---" for _ in head), *rows)]
    return [*lines, ""] if rows else []


# Commands


def leaves(command: Any, name: str = "hybridindex") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its words."""
    inner = getattr(command, "commands", None)
    if not inner:
        yield name, command
        return
    for word, each in inner.items():
        if not each.hidden:
            yield from leaves(each, f"{name} {word}")


def commands() -> str:
    """All commands, as markdown."""
    lines: list[str] = []
    for name, command in leaves(typer.main.get_command(make_app())):
        lines += [f"## {name.removeprefix('hybridindex ')}", ""]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        usage = " ".join([name, *(_argument(each) for each in arguments), "[OPTIONS]"])
        lines += ["```text", usage, "```", "", (command.help or "").replace("\b", "").strip(), ""]
        lines += _table(("argument", ""), [(f"`{_argument(each)}`", _line(each.help)) for each in arguments])
        context = command.context_class(command)
        records = [(each.get_help_record(context), each.required) for each in options]
        lines += _table(
            ("option", ""),
            [
                (f"`{name}`" + (" (required)" if is_required else ""), _line(text))
                for (name, text), is_required in records
            ],
        )
    return "\n".join(lines)


def _argument(each: Any) -> str:
    name = each.metavar or each.name.upper()
    name = f"{name}..." if each.nargs == -1 and not name.endswith("...") else name
    return name if each.required or name.startswith("[") else f"[{name}]"


# Routes


def openapi() -> dict[str, Any]:
    """The document of a daemon of an index with everything that adds routes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idx"
        hx.build(np.random.default_rng(0).standard_normal((256, 8), dtype=np.float32), path=path, nlist=4).close()
        service = Service.open(path, ServiceConfig())
        try:
            return create_app(service).openapi()
        finally:
            service.close()


def routes() -> str:
    """All routes, as markdown."""
    document = openapi()
    schemas = document.get("components", {}).get("schemas", {})
    lines: list[str] = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines += [f"## {method.upper()} `{path}`", "", (route.get("description") or route["summary"]).strip(), ""]
            parameters = [
                (f"`{each['name']}`", each["in"], _type(each.get("schema", {})), _line(each.get("description")))
                for each in route.get("parameters", [])
            ]
            lines += _table(("parameter", "in", "type", ""), parameters)
            for media, content in route.get("requestBody", {}).get("content", {}).items():
                lines += [f"Body, `{media}`:", "", *_fields(content.get("schema", {}), schemas)]
            answers = [(f"`{status}`", _line(each.get("description"))) for status, each in route["responses"].items()]
            lines += _table(("status", ""), answers)
    return "\n".join(lines)


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    required = schema.get("required", [])
    rows = [
        (f"`{name}`{'' if name in required else ' (optional)'}", _type(each), _line(each.get("description")))
        for name, each in schema.get("properties", {}).items()
    ]
    return _table(("field", "type", ""), rows) or [_line(schema.get("description")) or _type(schema), ""]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in several if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    inner = schema.get("items")
    return f"array of {_type(inner)}" if inner else str(schema.get("type", "any"))


# Decisions


def decisions() -> str:
    """One line for each, with its title."""
    rows = []
    for file in sorted((_DOCS / "adr").glob("0*.md")):
        title = file.read_text().partition("\n")[0].removeprefix("# ")
        number, _, name = title.partition(". ")
        rows.append((number, f"[{_line(name)}]({file.name})"))
    return "\n".join(_table(("number", "decision"), rows))


#: By the name that a page asks for.
PARTS: dict[str, Callable[[], str]] = {"commands": commands, "decisions": decisions, "routes": routes}


# What mkdocs calls


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_rest: Any) -> str:
    """One page before it is rendered.

    Raises:
        KeyError: it asks for a reference that there is not.
    """
    folder = posixpath.dirname(page.file.src_uri)
    markdown = _MARK.sub(lambda found: PARTS[found[1]](), markdown)
    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(block if at % 2 else _links(block, folder) for at, block in enumerate(blocks))


def _links(text: str, folder: str) -> str:
    def link(found: re.Match[str]) -> str:
        name, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path = target.partition("#")[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith(".."):
            return name
        if (_DOCS / path).is_dir():
            return f"[{name}]({posixpath.relpath(path + '/index.md', folder or '.')})"
        return found[0]

    return _LINK.sub(link, text)


def on_page_content(html: str, **_rest: Any) -> str:
    """One page after that: docstrings name each other by roles, which markdown does not know."""
    return _ROLE.sub("", html)
