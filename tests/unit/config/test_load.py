"""Layers, origins, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.config.load import FlagValue, load
from tidegate.config.schema import leaves, variables
from tidegate.config.tree import Config
from tidegate.errors import ConfigError

POLICY = "sticky_least_loaded"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tidegate.toml"
    file.write_text(text)
    return file


def refusal(file: Path | None = None, environ: dict[str, str] | None = None, **flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(file, environ, {path.replace("__", "."): FlagValue("--x", value) for path, value in flags.items()})
    return refused.value.message


def test_without_layers_everything_is_the_default() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == leaves().keys()


def test_each_layer_wins_over_the_one_before_and_leaves_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 1\n[server]\nport = 1\nhost = 'file'\nmax_attempts = 7\n")
    environ = {"TIDEGATE_SERVER_PORT": "2", "TIDEGATE_SERVER_HOST": "environment", "HOME": "/"}
    loaded = load(file, environ, {"server.port": FlagValue("--port", "3")})
    server = loaded.config.server
    assert (server.port, server.host, server.max_attempts, loaded.config.seed) == (3, "environment", 7, 1)
    assert loaded.origins["server.port"] == "flag --port"
    assert loaded.origins["server.host"] == "environment TIDEGATE_SERVER_HOST"
    assert loaded.origins["server.max_attempts"] == f"file {file}"
    assert loaded.origins["server.drain_timeout_s"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 5")
    loaded = load(environ={"TIDEGATE_CONFIG": str(file)})
    assert loaded.config.seed == 5
    assert "TIDEGATE_CONFIG" in loaded.origins["seed"]
    assert load(write(tmp_path, "seed = 6"), {"TIDEGATE_CONFIG": "/nowhere"}).config.seed == 6


def test_text_reads_as_lists_tables_booleans_and_none() -> None:
    config = load(
        environ={
            "TIDEGATE_SERVER_WORKER_URLS": "http://a, http://b http://c",
            "TIDEGATE_ENGINES_KV_CAPACITY_TOKENS_BY_URL": "http://a=1000,http://b=2000",
            "TIDEGATE_ENGINES_KV_EVENT_ENDPOINTS": '{"http://a": "tcp://a:1,tcp://a:2"}',
            "TIDEGATE_IDENTITY_READ_BODIES": "false",
            "TIDEGATE_RECORD_PATH": "none",
            "TIDEGATE_CORE_ADMISSION_HOLD_TIMEOUT_S": "2.5",
            "TIDEGATE_HTTP_RESPONSE_TIMEOUT_S": "None",
        }
    ).config
    assert config.server.worker_urls == ("http://a", "http://b", "http://c")
    assert config.engines.kv_capacity_tokens_by_url == {"http://a": 1000, "http://b": 2000}
    assert config.engines.kv_event_endpoints == {"http://a": "tcp://a:1,tcp://a:2"}
    assert config.identity.read_bodies is False
    assert config.record.path is None
    assert config.core.admission.hold_timeout_s == 2.5
    assert config.http.response_timeout_s is None


@pytest.mark.parametrize("leaf", leaves().values(), ids=lambda leaf: leaf.path)
def test_every_default_survives_being_written_as_text(leaf) -> None:  # type: ignore[no-untyped-def]
    """Whoever copies a default from the reference into the environment gets the default."""
    default = leaf.default
    if isinstance(default, dict):
        text = "{}"
    elif isinstance(default, (tuple, list)):
        text = ",".join(map(str, default))
    else:
        text = str(default)
    config = load(environ={leaf.variable: text}).config
    node = config
    for name in leaf.path.split("."):
        node = getattr(node, name)
    assert node == default


def test_variables_are_distinct() -> None:
    assert len(variables()) == len(leaves())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1", "unknown key 'server.prot'; did you mean 'server.port'?"),
        ("[sever]\nport = 1", "unknown key 'sever'; did you mean 'server'?"),
        ("polcy = 'x'", "unknown key 'polcy'; did you mean 'policy'?"),
        ("[server]\nport = 'x'", "server.port: Expected `int`, got `str`, got 'x'"),
        ("[server]\nport = 70000", "server.port: Expected `int` <= 65535, got 70000"),
        ("server = 5", "server: expected a table, got 5"),
        ("[log]\nlevel = 'warn'", "log.level: unknown value 'warn'; did you mean 'warning'?"),
        ("seed = ", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_key(text: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    message = refusal(file)
    assert message.startswith(f"file {file}: ")
    assert said in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not TOML" in refusal(binary)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TIDEGATE_HTTP_RESPONSE_TIMEOUT_S", "-1"),
        ("TIDEGATE_HTTP_RESPONSE_TIMEOUT_S", "0"),
        ("TIDEGATE_HTTP_RESPONSE_TIMEOUT_S", "nan"),
        ("TIDEGATE_HTTP_RESPONSE_TIMEOUT_S", "inf"),
        ("TIDEGATE_CORE_LEDGER_IDLE_TTL_CEILING_S", "inf"),
        ("TIDEGATE_CORE_ADMISSION_HOLD_TIMEOUT_S", "-1"),
        ("TIDEGATE_CORE_ADAPTIVE_CAP_MAX_CONTEXT_TOKENS", "0"),
        ("TIDEGATE_SERVER_PROMETHEUS_PORT", "70000"),
        ("TIDEGATE_ENGINES_KV_CAPACITY_TOKENS_BY_URL", "http://a=0"),
    ],
)
def test_optional_values_and_those_of_tables_have_bounds_too(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load(environ={variable: text})


def test_bad_variables_are_refused_by_name() -> None:
    said = refusal(environ={"TIDEGATE_SERVER_PROT": "1"})
    assert said == "environment TIDEGATE_SERVER_PROT: unknown variable; did you mean 'TIDEGATE_SERVER_PORT'?"
    said = refusal(environ={"TIDEGATE_SERVER_PORT": "x"})
    assert said.startswith("environment TIDEGATE_SERVER_PORT: server.port: ")
    assert "not a JSON object" in refusal(environ={"TIDEGATE_ENGINES_KV_EVENT_ENDPOINTS": "{1}"})
    assert "key=value" in refusal(environ={"TIDEGATE_ENGINES_KV_EVENT_ENDPOINTS": "alone"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIDEGATE_PORT", "tcp://10.0.0.1:80"),
        ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
        ("TIDEGATE_SERVICE_PORT", "80"),
        ("TIDEGATE_SERVICE_PORT_HTTP", "80"),
        ("TIDEGATE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("TIDEGATE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("TIDEGATE_ROUTER_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_what_kubernetes_injects_for_a_service_of_that_name_is_left_alone(name: str, value: str) -> None:
    assert load(environ={name: value}).config == Config()


def test_but_a_typo_is_not_taken_for_such_a_variable() -> None:
    assert "unknown variable" in refusal(environ={"TIDEGATE_SERVR_PORT": "8000"})


def test_an_unknown_policy_is_refused_with_the_nearest_name_wherever_it_comes_from(tmp_path: Path) -> None:
    said = refusal(policy="sticky_least_load")
    assert said.startswith(f"flag --x: unknown policy 'sticky_least_load'; did you mean '{POLICY}'? (one of ")
    assert refusal(environ={"TIDEGATE_POLICY": "nonsense"}).startswith("environment TIDEGATE_POLICY: unknown policy")


def test_every_setting_says_what_it_is() -> None:
    assert [leaf.path for leaf in leaves().values() if not leaf.description] == []
