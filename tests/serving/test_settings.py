import os
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from baton.rpc.tls import Tls
from baton.serving.settings import ServingSettings
from baton.settings.loading import load
from baton.worker.settings import WorkerSettings


class RoleSettings(ServingSettings):
    """Settings of some role."""

    worker_id: str | None = Field(None, description="Its name; 50% of them are made up.")
    num_blocks: int = Field(512, ge=16, description="Blocks in the pool.")


class NeedySettings(ServingSettings):
    """Settings of which one is required."""

    model: str = Field(description="The checkpoint.")


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "baton.yaml"
        path.write_text(text)
        return str(path)

    return write


def refused(capsys, argv, settings_class=RoleSettings) -> str:
    """The one sentence an unusable setting ends with."""
    with pytest.raises(SystemExit) as ended:
        load(settings_class, argv)
    assert ended.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "Traceback" not in sentence
    return sentence


def test_settings_have_defaults_when_nothing_is_given():
    settings = load(RoleSettings, [])
    assert settings == RoleSettings()
    assert (settings.host, settings.port, settings.num_blocks) == ("127.0.0.1", 0, 512)


def test_settings_prefer_flag_over_environment_over_file(config, monkeypatch):
    path = config("port: 1\nnum_blocks: 101\nadvertise_host: file\nlog_format: json\n")
    monkeypatch.setenv("BATON_NUM_BLOCKS", "102")
    monkeypatch.setenv("BATON_ADVERTISE_HOST", "environment")
    settings = load(RoleSettings, ["--config", path, "--advertise-host", "flag"])
    assert settings.port == 1
    assert settings.num_blocks == 102
    assert settings.advertise_host == "flag"
    assert settings.log_format == "json"


def test_settings_ignore_invalid_value_that_is_overridden(config, monkeypatch):
    monkeypatch.setenv("BATON_PORT", "nonsense")
    assert load(RoleSettings, ["--port=7", "--config", config("port: nonsense")]).port == 7


class RenamedSettings(RoleSettings):
    OLD_NAMES: ClassVar = {"num_pages": "num_blocks", "name": "worker_id"}


def test_settings_take_old_names_with_a_warning(config, monkeypatch, capsys):
    monkeypatch.setenv("BATON_NAME", "w")
    settings = load(RenamedSettings, ["--num-pages=64"])
    assert (settings.num_blocks, settings.worker_id) == (64, "w")
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1].partition(";")[0] for line in warnings] == [
        "--num-pages is now --num-blocks",
        "BATON_NAME is now BATON_WORKER_ID",
    ]
    monkeypatch.setenv("BATON_WORKER_ID", "present")
    settings = load(RenamedSettings, ["--config", config("num_pages: 65"), "--num-pages", "66"])
    assert (settings.num_blocks, settings.worker_id) == (66, "present")


def test_settings_file_may_be_named_by_environment(config, monkeypatch):
    monkeypatch.setenv("BATON_CONFIG", config("port: 9"))
    assert load(RoleSettings, []).port == 9


def test_settings_treat_empty_variable_as_unset(monkeypatch):
    monkeypatch.setenv("BATON_PORT", "")
    assert load(RoleSettings, []).port == 0


def test_boolean_settings_have_on_and_off_flags(monkeypatch):
    monkeypatch.setenv("BATON_REFLECTION", "true")
    assert load(RoleSettings, []).reflection
    assert not load(RoleSettings, ["--no-reflection"]).reflection


def test_settings_made_directly_ignore_environment(monkeypatch):
    monkeypatch.setenv("BATON_PORT", "7")
    assert RoleSettings().port == 0


def test_settings_are_immutable():
    settings = RoleSettings()
    with pytest.raises(ValidationError):
        settings.port = 3


def test_invalid_flag_error_names_flag_value_and_bound(capsys):
    sentence = refused(capsys, ["--port", "70000"])
    assert "--port is '70000'; must be less than or equal to 65535" in sentence


def test_invalid_choice_error_shows_value_and_choices(capsys):
    sentence = refused(capsys, ["--log-level", "loud"])
    assert "--log-level is 'loud'; must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'" in sentence


def test_invalid_variable_error_names_variable(capsys, monkeypatch):
    monkeypatch.setenv("BATON_NUM_BLOCKS", "3")
    sentence = refused(capsys, [])
    assert "BATON_NUM_BLOCKS is '3'; must be greater than or equal to 16" in sentence


def test_invalid_file_key_error_names_key(capsys, config):
    sentence = refused(capsys, ["--config", config("log_format: xml")])
    assert "log_format in the file is 'xml'; must be 'human' or 'json'" in sentence


def test_invalid_value_error_says_the_value_once(capsys):
    sentence = refused(capsys, ["--kv-connector=nope"], WorkerSettings)
    assert "--kv-connector is 'nope'; must be one of auto, grpc, " in sentence


def test_unknown_flag_error_suggests_closest_flag(capsys):
    assert "flag --prot is unknown; did you mean --port?" in refused(capsys, ["--prot=1"])


def test_unknown_flag_of_another_server_error_gives_advice(capsys):
    sentence = refused(capsys, ["--tensor-parallel-size=2"])
    assert "flag --tensor-parallel-size is unknown; a worker computes on one device" in sentence


def test_abbreviated_flag_is_refused(capsys):
    assert "flag --drain is unknown" in refused(capsys, ["--drain", "3"])


def test_unknown_file_key_error_suggests_closest_key(capsys, config):
    sentence = refused(capsys, ["--config", config("num_block: 3")])
    assert "key num_block is unknown; did you mean num_blocks?" in sentence


def test_flag_without_value_error_names_flag(capsys):
    assert "--port: expected one argument" in refused(capsys, ["--port"])


def test_missing_setting_error_names_all_sources(capsys):
    sentence = refused(capsys, [], NeedySettings)
    assert "--model is needed (or BATON_MODEL, or model in the file)" in sentence


@pytest.mark.parametrize("text", ["port: [", "- port", "\tport: 1", "5: 1"])
def test_settings_file_that_is_no_mapping_is_refused(capsys, config, text):
    assert "baton.yaml" in refused(capsys, ["--config", config(text)])


def test_missing_settings_file_error_names_path(capsys):
    assert "cannot read nowhere.yaml" in refused(capsys, ["--config", "nowhere.yaml"])


def test_help_lists_flags_defaults_and_variables(capsys):
    with pytest.raises(SystemExit) as ended:
        load(RoleSettings, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Settings of some role." in shown
    assert "--num-blocks int Blocks in the pool. (default: 512) [env: BATON_NUM_BLOCKS]" in shown
    assert "--log-format {human,json}" in shown
    assert "--reflection, --no-reflection" in shown
    assert "50% of them" in shown
    assert "env: BATON_CONFIG" in shown


def test_every_setting_has_description():
    for name, field in ServingSettings.model_fields.items():
        assert field.description, name


def test_settings_require_tls_or_insecure_beyond_loopback(capsys, monkeypatch):
    sentence = refused(capsys, ["--host", "0.0.0.0"])
    for flag in ("--tls-cert", "--tls-key", "--tls-ca", "--insecure"):
        assert flag in sentence
    assert load(RoleSettings, ["--host", "0.0.0.0", "--insecure"]).tls is None
    files = ["--tls-cert=a.pem", "--tls-key=a.key", "--tls-ca=ca.pem"]
    assert load(RoleSettings, ["--host", "0.0.0.0", *files]).tls == Tls("ca.pem", "a.pem", "a.key")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert load(RoleSettings, ["--host", host]).tls is None
    monkeypatch.setenv("BATON_HOST", "a-name-of-a-host")
    assert "a-name-of-a-host" in refused(capsys, [])


def test_tls_cert_setting_requires_key_and_ca(capsys):
    sentence = refused(capsys, ["--tls-cert", "a.pem"])
    assert "--tls-cert also needs --tls-key and --tls-ca" in sentence


def test_admin_host_setting_requires_tls_or_insecure(capsys):
    assert "--admin-host is '10.0.0.7'" in refused(capsys, ["--admin-host", "10.0.0.7"])
    assert load(RoleSettings, ["--admin-host", "10.0.0.7", "--insecure"]).tls is None
