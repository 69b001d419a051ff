"""Settings from files and options: every field arrives, from wherever it can be set, and errors name file and key."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import pytest

from hybridindex.cli.commands import chat
from hybridindex.cli.console import ExitCode
from hybridindex.config import RouterConfig, RouterSettings
from hybridindex.errors import InvalidInputError
from hybridindex.integrations.vllm_endpoint import PluginSettings
from hybridindex.refresh.config import RefreshConfig
from hybridindex.service import daemon, serving
from hybridindex.service.config import ServiceConfig
from hybridindex.service.settings import entries, read_settings
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.service.settings_reference import tables

ROOT = Path(__file__).resolve().parents[2]
WHOLE = tuple(entries(ServiceConfig))
ROUTER = tuple(entry for entry in WHOLE if entry.tables[:1] == ("router",))
#: Fields that are checked together with another, and such a value.
BESIDE = {"tls_cert": {"tls_key": "k.pem"}, "tls_key": {"tls_cert": "c.pem"}}


def other_value(entry):
    """A good value that is not the default, as a settings file has it."""
    kinds = [entry.type]
    if get_origin(entry.type) in (UnionType, Union):
        kinds = [kind for kind in get_args(entry.type) if kind is not type(None)]
    if get_origin(entry.type) is Literal:
        return next(word for word in get_args(entry.type) if word != entry.default)
    if kinds[0] is bool:
        return not entry.default
    if entry.name == "request_memory_bytes":  # no less than what is set aside
        return 1 << 29
    if kinds[0] is int:
        return (entry.default or 1) - 1 if entry.name == "max_k" else (entry.default or 1) + 1
    if kinds[0] is float:
        return (entry.default or 2.0) / 2
    if get_origin(kinds[0]) is tuple:
        return ["cpu"]
    return {"plan": "none", "host": "::1", "embedder_url": "http://h:1"}.get(entry.name, "some")


def words_of(entry, value):
    """The same as options."""
    if isinstance(value, bool):
        return [entry.flag if value else f"--no-{entry.flag[2:]}"]
    return [word for one in (value if isinstance(value, list) else [value]) for word in (entry.flag, str(one))]


def file_of(folder, entry, value):
    """The same as a settings file."""
    text = "".join(f"{name} = {json.dumps(said)}\n" for name, said in BESIDE.get(entry.name, {}).items())
    text += f"[{'.'.join(entry.tables)}]\n" if entry.tables else ""
    file = folder / "settings.toml"
    file.write_text(f"{text}{entry.name} = {json.dumps(value)}\n")
    return file


def value_in(config, entry):
    for name in entry.tables:
        config = getattr(config, name)
    return getattr(config, entry.name)


@pytest.fixture
def served(cli, monkeypatch):  # noqa: F811
    """Runs ``serve`` with options; the configuration that arrives at the daemon."""

    def run(*words):
        told = []
        monkeypatch.setattr(daemon, "serve", lambda _path, config, **options: told.append((config, options)))
        answer = cli("serve", "nowhere", *words)
        assert answer.code == 0, answer.err
        return told[0]

    return run


@pytest.fixture
def chatted(cli, monkeypatch):  # noqa: F811
    """Runs ``chat`` with options; the configuration that arrives where it opens a router."""

    def run(*words):
        told = []

        def stop(_owned, _index, _texts, config):
            told.append(config)
            raise InvalidInputError("stop")

        monkeypatch.setattr(chat, "DocumentStore", lambda _path: contextlib.nullcontext())
        monkeypatch.setattr(chat, "open_source", stop)
        answer = cli("chat", "nowhere", "--llm", "http://127.0.0.1:1", "-q", "what?", *words)
        assert (answer.code, "stop" in answer.err) == (ExitCode.BAD_INPUT, True), answer.err
        return told[0]

    return run


@pytest.mark.parametrize("entry", WHOLE, ids=lambda entry: ".".join((*entry.tables, entry.name)))
def test_every_field_can_be_set_by_an_option_and_by_a_file(served, tmp_path, entry):
    value = other_value(entry)
    beside = [
        word for name, said in BESIDE.get(entry.name, {}).items() for word in (f"--{name.replace('_', '-')}", said)
    ]
    by_option = served(*beside, *words_of(entry, value))[0]
    by_file = served("--config", file_of(tmp_path, entry, value))[0]
    arrived = value_in(by_option, entry)
    assert arrived != entry.default
    if isinstance(arrived, Path):
        # Relative to the working directory, and to the file's folder.
        assert (arrived, value_in(by_file, entry)) == (Path(value), tmp_path / value)
    else:
        assert arrived == value_in(by_file, entry) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("entry", ROUTER, ids=lambda entry: entry.name)
def test_every_field_of_the_router_reaches_chat_and_the_plugin(chatted, tmp_path, entry):
    value = other_value(entry)
    file = file_of(tmp_path, entry, value)
    plugin = PluginSettings.of({"HYBRIDINDEX_INDEX": "i", "HYBRIDINDEX_CONFIG": str(file)})
    configs = [chatted(*words_of(entry, value)), chatted("--config", file), plugin.config("127.0.0.1", None)]
    expected = tuple(value) if isinstance(value, list) else value
    assert [value_in(config, entry) for config in configs] == [expected] * 3


def test_keyword_arguments_are_the_fields():
    assert set(RouterSettings.__annotations__) == {field.name for field in RouterConfig.__dataclass_fields__.values()}


def test_options_override_the_file_and_what_neither_says_is_the_default(served, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('plan = "none"\nport = 1\n[router]\nthreads = 3\nearly_dispatch = false\n[limits]\nmax_k = 7\n')
    config, _ = served("--config", file, "--threads", 2, "--port", 0, "--early-dispatch")
    assert config.router == RouterConfig(threads=2)
    assert (config.plan, config.port, config.limits) == ("none", 0, replace(ServiceConfig().limits, max_k=7))


def test_sizes_are_written_as_people_write_them(served, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('[router]\ndevices = ["cpu", "cpu"]\ndevice_budget_bytes = ["1MiB", 2048]\n')
    assert served("--config", file)[0].router.device_budget_bytes == (1 << 20, 2048)
    assert served("--config", file, "--budget", "3KiB")[0].router.device_budget_bytes == 3072
    file.write_text('[router]\ndevice_budget_bytes = "1GiB"\n')
    assert served("--config", file)[0].router.device_budget_bytes == 1 << 30


def test_false_means_none_where_a_setting_is_optional(served, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('host = false\nuds = "/run/x.sock"\n[limits]\ndefault_deadline_ms = false\n')
    config, _ = served("--config", file)
    assert (config.host, config.uds, config.limits.default_deadline_ms) == (None, Path("/run/x.sock"), None)
    assert served("--no-tcp", "--uds", "/run/x.sock")[0].host is None


def test_a_refresher_is_made_where_the_file_or_an_option_asks_for_one(served, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("[refresh]\nreservoir_queries = 600\n[refresh.drift]\nwindow_requests = 100\n")
    assert served()[1]["make_refresher"] is None
    assert served("--config", file, "--no-refresh")[1]["make_refresher"] is None
    assert served("--config", file)[1]["make_refresher"] is not None
    assert served("--refresh", "--keep-queries", 600)[1]["make_refresher"] is not None


FOLLOWING = tuple(entries(RefreshConfig, tables=("refresh",)))


@pytest.mark.parametrize("entry", FOLLOWING, ids=lambda entry: ".".join((*entry.tables, entry.name)))
def test_every_field_of_the_refresh_reaches_the_daemon_and_the_plugin(served, tmp_path, monkeypatch, entry):
    monkeypatch.setattr(serving, "Refresher", lambda _index, _router, _store, config: config)
    value = {"z": 4.0, "of_windows": 4, "off_windows": 1, "max_back_off_s": 7200.0, "planning_nice": 4}.get(
        entry.name, other_value(entry)
    )
    file = file_of(tmp_path, entry, value)
    option = [entry.flag_after(f"{entry.tables[-1]}_"), value]
    plugin = PluginSettings.of({"HYBRIDINDEX_INDEX": "i", "HYBRIDINDEX_CONFIG": str(file)})
    made = [
        served("--refresh", *option)[1]["make_refresher"],
        served("--config", file)[1]["make_refresher"],
        plugin.make_refresher(),
    ]
    inner = replace(entry, tables=entry.tables[1:])
    assert [value_in(make(None, None, None), inner) for make in made] == [value] * 3
    # Plans that are asked for are made as the table says, with and without a refresher.
    plans = [served(*option)[1]["planning"], served("--config", file, "--no-refresh")[1]["planning"], plugin.planning()]
    assert [value_in(config, inner) for config in plans] == [value] * 3
    assert value != entry.default


def test_the_plugin_follows_the_load_where_file_or_environment_say_so(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("[refresh]\n")

    def made(**environment):
        return PluginSettings.of({"HYBRIDINDEX_INDEX": "i", **environment}).make_refresher() is not None

    config = {"HYBRIDINDEX_CONFIG": str(file)}
    assert [made(), made(HYBRIDINDEX_REFRESH="1"), made(**config), made(**config, HYBRIDINDEX_REFRESH="0")] == [
        False, True, True, False,
    ]  # fmt: skip
    with pytest.raises(InvalidInputError, match="HYBRIDINDEX_REFRESH is 'yes'; expected 0 or 1"):
        made(HYBRIDINDEX_REFRESH="yes")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prt = 1", ["prt is not a setting", "expected port"]),
        ("[router]\nthread = 1", ["[router] thread is not a setting", "expected threads"]),
        ("[router.health]\nstuck = 1", ["[router.health] stuck is not a setting", "expected stuck_s"]),
        ("[rooter]\nthreads = 1", ["rooter is not a setting", "expected router"]),
        ("router = 1", ["router is 1", "expected the table [router]"]),
        ("[refresh]\nattainement = 1", ["[refresh] attainement is not a setting", "expected attainment"]),
        ("refresh = true", ["refresh is True", "expected the table [refresh]"]),
        ('port = "8080"', ["port is '8080'", "expected a whole number"]),
        ("[router]\nthreads = true", ["[router] threads is True", "expected a whole number, or false for none"]),
        ('[router]\nearly_dispatch = "no"', ["early_dispatch is 'no'", "expected true or false"]),
        ('[router]\ndevices = "cpu"', ["[router] devices is 'cpu'", "expected a list"]),
        ('[router]\nhost_scanner = "gpu"', ["host_scanner is 'gpu'", "'native'"]),
        ('[router]\npin_host_lists = "many"', ["pin_host_lists", "'many'", "MiB"]),
        ("[router]\nthreads = 0", ["[router] threads is 0", "expected 1..4096"]),
        ('[router]\ndevices = ["cpu"]\ndevice_budget_bytes = [1, 2]', ["[router] device_budget_bytes has 2 entries"]),
        ('host = "0.0.0.0"', ["host is '0.0.0.0'", "key_file is missing"]),
        ('tls_cert = "c.pem"', ["tls_key is missing"]),
        ("port = ", ["is not a settings file", "expected TOML"]),
        ("port = " + "9" * 5000, ["is not a settings file"]),
        ("port = " + "[" * 3000 + "]" * 3000, ["is not a settings file"]),
        ("#" * (1 << 20) + "\nport = 1", ["is not a settings file", "more than 1,048,576 bytes"]),
        ("slo_ms = " + "9" * 400, ["slo_ms is 999", "expected a number above 0"]),
        (f'[router]\npin_host_lists = "{"9" * 400}"', ["pin_host_lists: size is '999"]),
        ("[refresh]\ntick_s = inf", ["[refresh] tick_s is inf", "at most 1e+09"]),
        ("[refresh]\nreservoir_queries = 511", ["[refresh] reservoir_queries is 511", "512, so that an update finds"]),
        ("[refresh]\nreservoir_queries = -1", ["[refresh] reservoir_queries is -1"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_file_is_said_before_anything_opens(cli, tmp_path, text, words):  # noqa: F811
    file = tmp_path / "settings.toml"
    file.write_text(text)
    answer = cli("serve", tmp_path / "no_index", "--config", file, "--json")
    assert answer.code == ExitCode.BAD_INPUT
    assert all(word in answer.json["error"]["message"] for word in [str(file), *words]), answer.json
    assert not (tmp_path / "no_index").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"gone\.toml is not a settings file"):
        read_settings(tmp_path / "gone.toml")


def test_what_an_option_says_wrong_is_not_the_files_fault(cli, tmp_path):  # noqa: F811
    file = tmp_path / "settings.toml"
    file.write_text("[router]\nthreads = 2\n")
    answer = cli("serve", tmp_path, "--config", file, "--threads", 0, "--json")
    assert answer.json["error"]["message"].startswith("threads is 0")


def test_the_plugin_has_vllms_address_and_the_environment_overrides_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('port = 9\nuds = "/run/x.sock"\nplan = "none"\n[router]\nthreads = 2\nmax_batch = 3\n[refresh]\n')
    environment = {"HYBRIDINDEX_INDEX": "i", "HYBRIDINDEX_CONFIG": str(file), "HYBRIDINDEX_THREADS": "4"}
    config = PluginSettings.of(environment).config("127.0.0.1", None)
    assert (config.host, config.uds, config.plan) == ("127.0.0.1", None, "none")
    assert config.router == RouterConfig(threads=4, max_batch=3)


def test_the_reference_has_every_setting():
    text = (ROOT / "docs" / "settings.md").read_text()
    for title, table in tables().items():
        assert table in text, f"docs/settings.md lacks a row of [{title}]: python -m tests.service.settings_reference"


def test_the_example_loads():
    config = read_settings(ROOT / "examples" / "hybridindex.toml").without("refresh").build(ServiceConfig)
    assert config.router.devices == ("cuda:0",)
