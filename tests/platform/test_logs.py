"""Logs are one JSON object a line where a machine reads them, ours and the libraries' alike."""

import json
import logging

import pytest
import structlog

from polygraft import logs


@pytest.mark.usefixtures("logging_as_it_was")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    log = structlog.get_logger()
    log.debug("quiet")
    log.info("request", status=200)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("careful: %s", "hot")
    out, err = capsys.readouterr()
    assert out == ""
    ours, failure, library = (json.loads(line) for line in err.splitlines())
    assert (ours["event"], ours["status"], ours["level"]) == ("request", 200, "info")
    assert ours["timestamp"].endswith("Z")
    assert "ValueError: broken" in failure["exception"]
    assert (library["event"], library["level"]) == ("careful: hot", "warning")


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("form", ["auto", "console"])
def test_lines_for_people(capsys: pytest.CaptureFixture[str], form: logs.LogFormat) -> None:
    logs.configure("warning", form)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", reason="test")
    [line] = capsys.readouterr().err.splitlines()
    assert "loud" in line
    # Nobody sits at this stderr, so `auto` is JSON.
    assert line.startswith("{") is (form == "auto")


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_variables(capsys: pytest.CaptureFixture[str], form: logs.LogFormat) -> None:
    def fail(prompt: str) -> None:
        raise ValueError(f"{len(prompt)} tokens are too many")

    logs.configure("info", form)
    try:
        fail("".join(["a sec", "ret of the tenant's"]))  # not in one piece in a source line, which tracebacks show
    except ValueError:
        structlog.get_logger().exception("failed")
    shown = capsys.readouterr().err
    assert "24 tokens are too many" in shown
    assert "a secret" not in shown
