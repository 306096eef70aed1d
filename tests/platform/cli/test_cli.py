"""Commands, their exit codes and what they say when used wrongly."""

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polygraft.cli import COMMANDS, app
from polygraft.cli.options import SECRETS
from polygraft.listener import listen, port_of
from polygraft.lock import locked
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft_engine.models.architecture import supported_architectures


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, with an adapter's folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    return tmp_path


def run(*arguments: str, columns: int = 200) -> Result:
    """The command line, wide enough that messages are not broken up."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for target in COMMANDS:
        assert target.name in result.output
        assert target.summary in result.output


@pytest.mark.parametrize("command", [target.name for target in COMMANDS])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output


def test_serve_has_an_option_for_every_setting_but_the_secrets() -> None:
    shown = run("serve", "--help", columns=80).output
    assert max(map(len, shown.splitlines())) <= 80
    for name in Settings.model_fields:
        option = f"--{name.replace('_', '-')}"
        assert (f"{option} " in shown) is (name not in SECRETS), name


def test_settings_say_what_every_option_is_for() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serv"], "Did you mean 'serve'?"),
        (["serve", "m", "--max-lora", "3"], "--max-loras"),
        (["serve", "m", "--adaptor", "a=adapter"], "--adapter"),
        (["serve", "m", "--device", "gpu"], "'cpu'"),
        (["serve", "m", "--port", "many"], "--port"),
        (["serve", "m", "--model", "n"], "two models"),
        (["bench", "--popularity", "normal"], "'zipf'"),
    ],
)
def test_wrong_usage_is_2_and_names_what_was_meant(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "m", "--port", "70000"], "--port 70000: "),
        (["serve", "m", "--kv-cache-memory", "lots"], "write it like 2GiB"),
        (["gateway", "--drain-timeout", "-1"], "--drain-timeout -1"),
        (["worker", "m", "--threads", "0"], "--threads 0: "),
        (["serve"], "which model?"),
        (["db", "upgrade", "--database-url", "nonsense"], "no database URL"),
        (
            ["serve", "m", "--port", "0", "--metrics-port", "0", "--database-url", "mysql://h/d"],
            "sqlite and postgresql",
        ),
        (["chat", "--url", "localhost"], "localhost is no address of a server"),
        (["chat", "--api-key", "é"], "no key has"),
        (["bench", "--url", "ftp://host"], "ftp://host is no address of a server"),
        (["bench", "--api-key", "pg a"], "no key has"),
    ],
)
def test_a_malformed_or_missing_value_is_2_and_one_error_on_stderr(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_malformed_value_in_the_environment_is_2_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYGRAFT_MAX_LORAS", "none")
    result = run("serve", "m")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: --max-loras none: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "m", "--max-loras", "8", "--max-cpu-loras", "4"], "--max-cpu-loras 4 is less than --max-loras 8"),
        (["serve", "m", "--auth", "none", "--host", "0.0.0.0"], "loopback only"),
        (["serve", "m", "--adapter", "a=adapter b=adapter"], "is 'b' a second adapter"),
        (["serve", "m", "--adapter", "M=adapter"], "clashes with the base model 'm'"),
        (["serve", "x/tuned", "--adapter", "tuned=adapter"], "clashes with the base model 'tuned'"),
        (["serve", "m", "--served-model-name", "tuned", "--adapter", "tuned=adapter"], "base model 'tuned'"),
        (["serve", "m", "--adapter", "a=adapter", "--adapter", "a=adapter"], "'a' is given twice"),
        (["serve", "m", "--blob-store", "gs://bucket"], "--blob-store gs://bucket"),
        (["db", "check", "--data-dir", "nowhere"], "unable to open database file"),
        (["chat", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
        (["bench", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_what_the_operator_can_put_right_is_1_and_one_error_on_stderr(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gateway"], "--redis-url"),
        (["gateway", "--redis-url", "redis://h"], "--blob-store or --data-dir"),
        (["gateway", "--redis-url", "redis://h", "--data-dir", "d"], "the database is not ready"),
        (["worker"], "which model?"),
        (["worker", "m"], "--redis-url"),
        (["worker", "m", "--redis-url", "redis://h"], "--blob-store or --data-dir"),
    ],
)
def test_halves_that_no_restart_can_help_end_with_78(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == CONFIG_EXIT_CODE, result.output
    assert says in result.stderr


def test_a_port_in_use_is_told_before_anything_is_started() -> None:
    taken = listen("127.0.0.1", 0, "--port")
    port = port_of(taken)
    for option in ("--port", "--metrics-port"):
        other = {"--port": "--metrics-port", "--metrics-port": "--port"}[option]
        result = run("serve", "m", "--data-dir", "data", option, str(port), other, "0")
        assert result.exit_code == 1
        assert f"port {port} on 127.0.0.1 is in use; choose another with {option}" in result.stderr
    taken.close()
    assert not Path("data/registry.db").exists()


def test_a_host_that_is_not_ours_is_told(folder: Path) -> None:
    result = run("serve", "m", "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 1
    assert "cannot listen on 192.0.2.1" in result.stderr


def test_a_data_folder_serves_one_server(folder: Path) -> None:
    with locked(folder / "data" / "lock"):
        result = run("serve", "m", "--data-dir", "data", "--port", "0", "--metrics-port", "0")
        assert result.exit_code == 1
        assert f"in use by process {os.getpid()}" in result.stderr
    with locked(folder / "data" / "lock"):
        pass


def test_a_data_folder_that_cannot_be_made_is_told(folder: Path) -> None:
    (folder / "file").write_text("")
    result = run("serve", "m", "--data-dir", "file/data")
    assert result.exit_code == 1
    assert "data folder file/data cannot be used" in result.stderr


def test_listeners_take_free_ports_and_both_families() -> None:
    sockets = [listen(host, 0, "--port") for host in ("127.0.0.1", "localhost", "0.0.0.0")]
    assert all(port_of(one) > 0 for one in sockets)
    assert sockets[0].family == socket.AF_INET
    for one in sockets:
        one.close()


def test_db_upgrade_makes_what_db_check_wants(folder: Path) -> None:
    assert run("db", "check", "--data-dir", "data").exit_code == 1
    assert run("db", "upgrade", "--data-dir", "data").exit_code == 0
    assert run("db", "check", "--data-dir", "data").exit_code == 0
    assert run("db", "upgrade", "--data-dir", "data").exit_code == 0


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "9999, which this release does not know"),
        ("DROP TABLE alembic_version", "tables that Polygraft did not make"),
        ("ALTER TABLE tenants ADD COLUMN surplus INTEGER", "differs from the models"),
    ],
)
def test_nothing_runs_on_a_schema_that_is_not_this_release_s(folder: Path, statement: str, says: str) -> None:
    run("db", "upgrade", "--data-dir", "data")
    with closing(sqlite3.connect("data/registry.db")) as database, database:
        database.execute(statement)
        before = list(database.iterdump())
    free = ["--port", "0", "--metrics-port", "0"]
    redis = ["--redis-url", "redis://127.0.0.1:1"]
    fds = [listen("127.0.0.1", 0, option) for option in ("--port", "--metrics-port")]
    passed = ["--listen-fd", str(fds[0].fileno()), "--metrics-fd", str(fds[1].fileno())]
    for arguments, code in (
        (["db", "check"], 1),
        (["serve", "m", *free], 1),
        (["gateway", *redis, *free], CONFIG_EXIT_CODE),
        (["gateway", *redis, *passed], CONFIG_EXIT_CODE),
    ):
        result = run(*arguments, "--data-dir", "data")
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), (arguments, result.output)
        assert says in result.stderr
    for one in fds:
        one.close()
    with closing(sqlite3.connect("data/registry.db")) as database:
        assert list(database.iterdump()) == before


def test_a_database_that_is_away_when_a_gateway_is_started_again_is_waited_for(folder: Path) -> None:
    fds = [listen("127.0.0.1", 0, option) for option in ("--port", "--metrics-port")]
    passed = ["--listen-fd", str(fds[0].fileno()), "--metrics-fd", str(fds[1].fileno())]
    result = run("gateway", "--redis-url", "redis://127.0.0.1:1", *passed, "--data-dir", "away")
    assert (result.exit_code, "cannot be used" in result.stderr) == (1, True), result.output
    for one in fds:
        one.close()


def test_models_are_listed_for_people_and_for_machines() -> None:
    names = [row.name for row in supported_architectures()]
    listed = json.loads(run("models", "--json").stdout)
    assert [row["architecture"] for row in listed] == names
    for name in names:
        assert name in run("models").stdout


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.parametrize("directory", ["root", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_the_gateway_and_the_commands_are_free_of_torch(directory: str, folder: Path) -> None:
    # demo-model converts weights.
    modules = [target.where.partition(":")[0] for target in COMMANDS if target.name != "demo-model"]
    code = (
        f"import sys, {', '.join(modules)}, polygraft.gateway;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    where = Path(__file__).parents[3] if directory == "root" else folder
    found = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_the_help_imports_no_command() -> None:
    code = (
        "import sys, polygraft.cli; from typer.testing import CliRunner;"
        "CliRunner().invoke(polygraft.cli.app, ['--help']);"
        "print([name for name in ('fastapi', 'sqlalchemy', 'redis', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(("arguments", "code"), [(["models"], 0), (["serve"], 2), (["serv"], 2)])
def test_a_process_ends_with_its_exit_code_and_all_that_it_said(arguments: list[str], code: int) -> None:
    ended = subprocess.run([sys.executable, "-m", "polygraft", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    said = ended.stdout if code == 0 else ended.stderr
    assert said.endswith("\n")
    assert (code == 0) == ("SmolLM" in said or "Llama" in said)
