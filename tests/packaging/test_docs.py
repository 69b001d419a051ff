"""What the documentation names is there: files, modules, links, commands with their options, names of the code.

A path in backticks may leave out ``hybridindex/`` at its front. A bare file name must be the only one of that name in
the product, or stand in a paragraph that names its folder. Architecture decisions keep the names of their time; their
paths and links follow.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from hybridindex.cli.main import make_app
from hybridindex.old_paths import MOVED

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs/adr").glob("0*.md"))
#: Top folders of ours; links to rooms inside the package are not followed.
FOLDERS = ("hybridindex", "router", "partitioner", "profiler", "migrations", "tests", "benchmarks", "examples", "docs")
PRODUCT = FOLDERS[:5]
SOURCE = r"\.(?:py|cpp|h|sh|js|css|html|toml|yml|yaml|md|svg|png|json|txt)"
#: Files that our programs write, and the pattern of a name.
NOT_OURS = {
    "daemon.json",
    "checksums.json",
    "manifest.json",
    "rabitq.json",
    "attributes.json",
    "share.json",
    "snapshot.json",
    "cluster.json",
    "machines.json",
    "nodes.json",
    "ray.json",
    "keys.json",
    "NNNN_what_changed.py",
}
#: A logger and a span of traces.
NOT_MODULES = {"hybridindex.audit", "hybridindex.queue"}
#: Names that the text forbids, or says to be gone, and those of other programs.
NOT_OUR_NAMES = {
    "Helper",
    "Util",
    "OTEL_TRACES_SAMPLER",
    "DeprecationWarning",
    "IndexPreTransform",
    "OnDiskInvertedLists",
}
NOT_OUR_NAMES |= {"RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"}
NOT_OUR_NAMES |= {"Accept", "Host", "Origin", "predicted_min_hit_rate_quantile", "coverage_series", "latency_series"}

pages = pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: page.name)
current = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def files() -> frozenset[str]:
    """Every file of ours, as a path from the root."""
    found = set()
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*"):
            parts = path.relative_to(ROOT).parts
            through_a_link = parts[0] == "hybridindex" and parts[1] in PRODUCT
            if path.is_file() and not through_a_link and "__pycache__" not in parts:
                found.add("/".join(parts))
    return frozenset(found | {path.name for path in ROOT.iterdir() if path.is_file()})


@cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for file in files() for parent in Path(file).parents)


@cache
def words() -> frozenset[str]:
    """Every word of our sources."""
    found: set[str] = set()
    for file in files() - {"tests/packaging/test_docs.py"}:
        if Path(file).suffix in {".py", ".cpp", ".h", ".toml", ".sh", ".js", ".txt"} or "." not in Path(file).name:
            found.update(re.findall(r"\w[\w-]*", (ROOT / file).read_text(errors="replace")))
            found.add(Path(file).stem)
    return frozenset(found | {word.replace("-", "_") for word in found})


@cache
def types() -> frozenset[str]:
    """Classes, and what is assigned: any text may have the word."""
    found: set[str] = set()
    for file in files():
        if Path(file).suffix in {".py", ".cpp", ".h"}:
            text = (ROOT / file).read_text(errors="replace")
            found.update(re.findall(r"\b(?:class|struct) (\w+)", text))
            found.update(re.findall(r"^\s*(\w+)(?:: \w+)? = ", text, flags=re.M))
    return frozenset(found)


@cache
def command_line() -> Any:
    return typer.main.get_command(make_app())


def prose(page: Path) -> list[str]:
    """Paragraphs without code blocks; a table's row is a paragraph."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return [re.sub(r"\s*\n\s*", " ", part) for part in re.split(r"\n\s*\n|\n(?=\|)", text)]


def spans(paragraph: str) -> list[str]:
    return re.findall(r"`([^`]+)`", paragraph)


def resolved(name: str) -> str | None:
    """The path from the root of a file or folder that may be named without ``hybridindex/``."""
    name = name.rstrip("/")
    return next((path for path in (name, f"hybridindex/{name}") if path in files() or path in folders()), None)


def missing_paths(paragraph: str) -> list[str]:
    missing, near = [], set()
    for span in spans(paragraph):
        span = span.split("::")[0]
        if not re.fullmatch(r"[\w./-]+", span) or span.startswith("/") or Path(span).name in NOT_OURS:
            continue
        found = resolved(span)
        if found:
            near.add(str(Path(found).parent))
            near.add(found)
        is_file = re.search(SOURCE + "$", span) is not None
        if "/" not in span and is_file and not found:
            places = [file for file in files() if Path(file).name == span]
            ours = [file for file in places if file.split("/")[0] in PRODUCT]
            beside = any(f"{folder}/{span}" in files() for folder in near)
            if not (beside or len(ours or places) == 1):
                missing.append(span)
        elif "/" in span and not found and (is_file or resolved(span.split("/")[0]) in folders()):
            missing.append(span)
    return missing


@pages
def test_every_path_exists(page):
    missing = [path for paragraph in prose(page) for path in missing_paths(paragraph)]
    assert not missing, f"{page.name} names {missing}"


def test_a_path_that_is_gone_is_noticed():
    assert missing_paths("`router/batch/split.py`, `merge.py` and `router/devices`") == []
    assert missing_paths("`router/split.py`, `run.py`, `router/stages`") == [
        "router/split.py",
        "run.py",
        "router/stages",
    ]


@pages
def test_every_link_resolves(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ +(.*)$", file.read_text(), flags=re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name} links to {target}, which has {sorted(slugs)}"


@pages
def test_every_module_exists(page):
    # The changelog names modules of 0.1.
    was = set(MOVED) if page.name == "CHANGELOG.md" else set()
    for name in re.findall(r"(?<![\w.])(?:python -m +)?((?:benchmarks|hybridindex)(?:\.\w+)+)", page.read_text()):
        if page in DECISIONS and not name.startswith("benchmarks"):
            continue
        assert name in NOT_MODULES | was or module_or_name(name), f"{page.name} names {name}"


def module_or_name(name: str) -> bool:
    """A module of ours, or a name in one: the part that is a module exists, the next word stands in it."""
    if Path(name).suffix[1:] in {"toml", "service", "sh"}:
        return True
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count])
        for base in (path, path.removeprefix("hybridindex/")):
            file = next((f for f in (f"{base}.py", f"{base}/__init__.py") if f in files()), None)
            if file:
                rest = parts[count:]
                return not rest or rest[0] in re.findall(r"\w+", (ROOT / file).read_text())
    return False


def test_a_module_that_is_gone_is_noticed():
    there = ("hybridindex.tiers.contract.protocol.Scanner", "benchmarks.host.host_scan")
    gone = ("hybridindex.tiers.protocol.Scanner", "benchmarks.host_scan")
    assert [module_or_name(name) for name in (*there, *gone)] == [True, True, False, False]


def is_known(word: str) -> bool:
    """Our sources write metrics and environment variables without their prefix, and some metrics without ``_total``."""
    if re.fullmatch(r"[A-Z][a-z]\w*", word):
        return word in types() or word in NOT_OUR_NAMES
    bare = re.sub(r"^hybridindex_|^HYBRIDINDEX_", "", word)
    forms = {word, bare, bare.removesuffix("_total")}
    if word.startswith("_"):
        return any(other.endswith(tuple(forms)) for other in words())
    return not (forms.isdisjoint(words()) and forms.isdisjoint(NOT_OUR_NAMES))


@current
def test_names_of_the_code_exist(page):
    """``Class``, ``Class.method``, ``function_name``: every part stands in our sources."""
    unknown = []
    for paragraph in prose(page):
        for span in spans(paragraph):
            name = re.sub(r"\(.*\)$|=$", "", span)
            is_name = re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", name) and not re.search(SOURCE + "$", name)
            if is_name and re.search(r"_|[a-z][A-Z]|^[A-Z][a-z]", name):
                unknown += [name for part in name.split(".") if not is_known(part)]
    assert not unknown, f"{page.name} names {unknown}"


def test_a_name_that_is_gone_is_noticed():
    assert all(map(is_known, ["Router", "hybridindex_stage_seconds"]))
    gone = ["Shell", "Door", "Holder", "Patience", "Holdings", "DeviceLane", "MoveQueue", "PlainBytes", "thread_ends"]
    assert [name for name in gone if is_known(name)] == []


def command_lines(page: Path) -> list[str]:
    """Every ``hybridindex …`` in code, without comments."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.M | re.S)
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in blocks for line in block.splitlines()]
    lines += [span for paragraph in prose(page) for span in spans(paragraph)]
    found = [part.strip() for line in lines for part in re.split(r";|&&|\|", line)]
    return [line for line in found if re.match(r"(?:\S+/)?hybridindex \w", line)]


def unknown_in(line: str) -> str | None:
    """What the command line does not have: a command or an option."""
    parts = shlex.split(re.sub(r"[\[\]…]", " ", line).replace("'", ""))[1:]
    command = command_line()
    while parts and getattr(command, "commands", None):
        if parts[0].startswith("-"):
            break
        # `profile INDEX` is `profile index INDEX`.
        name = parts.pop(0) if parts[0] in command.commands or "index" not in command.commands else "index"
        if name not in command.commands:
            return name
        command = command.commands[name]
    options = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    used = {part.split("=")[0] for part in parts if re.match(r"--?[a-z]", part)}
    return next(iter(sorted(used - options - {"--help", "-h"})), None)


@current
def test_every_command_and_option_exists(page):
    for line in command_lines(page):
        assert unknown_in(line) is None, f"{page.name}: {line} has {unknown_in(line)}"


@current
def test_every_option_in_the_text_exists(page):
    """``--option`` and ``command --option``, of a command of ours or of a program in the repository."""
    group = command_line()
    known = {
        option
        for command in (group, *group.commands.values())
        for inner in [command, *getattr(command, "commands", {}).values()]
        for parameter in inner.params
        for option in [*parameter.opts, *parameter.secondary_opts]
    }
    for paragraph in prose(page):
        for span in spans(paragraph):
            command = span.partition(" ")[0]
            if command in group.commands and " --" in span:
                assert unknown_in(f"hybridindex {span}") is None, f"{page.name}: {span}"
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                bare = option.removeprefix("--")
                assert option in known or bare in words() or bare.replace("-", "_") in words(), (
                    f"{page.name} names {option}"
                )


def test_an_option_that_is_gone_is_noticed():
    assert unknown_in("hybridindex serve idx --uds /run/x --no-retry-open") is None
    assert unknown_in("hybridindex serve idx --sockets") == "--sockets"
    assert unknown_in("hybridindex keys idx --forge") in {"idx", "--forge"}
    assert unknown_in("hybridindex calibrate idx") == "calibrate"


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda page: page.name)
def test_a_decision_says_whether_it_stands(decision):
    number, status = re.match(
        r"# (\d{4})\. .+\n\n(Status: (?:accepted|superseded)\b.*)?", decision.read_text()
    ).groups()
    assert decision.name.startswith(number)
    assert status


_THREAD = r'(?:name=f?|prefix=|ThreadPoolExecutor\(\w+, )"(hybridindex-[a-z-]+)'


def test_threads_are_those_of_the_code():
    table = (ROOT / "docs/devices.md").read_text().partition("## Threads")[2]
    named = {name.removesuffix("-N") for name in re.findall(r"`(hybridindex-[\w-]+)`", table)}
    code = [(ROOT / file).read_text() for file in files() if file.startswith(PRODUCT) and file.endswith(".py")]
    started = {name.rstrip("-") for text in code for name in re.findall(_THREAD, text)}
    # Only a command that runs PipeRAG has it.
    assert named == started - {"hybridindex-piperag"}
