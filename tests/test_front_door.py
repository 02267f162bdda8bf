"""The command line: what is declared once in `Settings` is what a user meets."""

import importlib
import importlib.metadata
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import crossbatch
from serving.progress import progress

SETTINGS = {
    name: importlib.import_module(module).Settings for name, (module, _) in crossbatch.COMMANDS.items()
}


def sentence(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must end with one sentence and status 2; return the sentence."""
    assert crossbatch.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("crossbatch ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def test_without_words_commands_are_listed_and_the_version_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert crossbatch.main([]) == crossbatch.main(["--version"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in crossbatch.COMMANDS)
    assert told.endswith(f"\ncrossbatch {importlib.metadata.version('crossbatch')}\n")


@pytest.mark.parametrize("name", SETTINGS)
def test_help_shows_every_setting_with_its_variable(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        crossbatch.main([name, "--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    settings: type[BaseModel] = SETTINGS[name]
    for field, info in settings.model_fields.items():
        assert info.description, field
        assert " ".join(info.description.rstrip(".").split()) in shown, field
        positional = isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("positional")
        assert positional or f"[CROSSBATCH_{name.upper()}_{field.upper()}]" in shown, field


def test_help_tells_paths_and_numbers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        crossbatch.main(["serve", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--tls-client-ca PATH", "--max-in-flight N", "--max-wait-ms NUMBER", "--model MODEL"):
        assert flag in shown
    assert "--provider auto|cpu|openvino|cuda|tensorrt" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian", "'train'"),
        ("search photo.jpg --galery birds", "did you mean '--gallery'"),
        ("search photo.jpg --top-k 5", "did you mean '-k'"),
        ("serve --device cuda", "did you mean '--provider'"),
        ("index --device cuda", "did you mean '--provider'"),
        ("train photos --epochs 3", "did you mean '--set epochs=3'"),
        ("sweep photos --learning-rate=0.1", "did you mean '--set learning_rate=0.1'"),
        ("serve", "--model is missing"),
        ("serve --model m.onnx --galleries g --port 99999", "--port cannot be '99999': .*65535"),
        ("serve model.onnx --galleries g", "The word 'model.onnx' has no flag before it"),
        ("index galleries/x --model m.onnx --data=", "--data was given an empty value"),
    ],
)
def test_what_is_wrong_names_what_is_right(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(says, sentence(capsys, *words.split()))


@pytest.mark.parametrize("command", ["gallery list", "serve --model m.onnx"])
def test_a_command_leaves_no_handler_on_a_stream_of_its_caller(command: str, tmp_path: Path) -> None:
    before = logging.getLogger().handlers[:]
    crossbatch.main([*command.split(), "--galleries", str(tmp_path)])
    assert logging.getLogger().handlers == before


def test_a_variable_gives_a_setting_and_a_flag_overrides_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSBATCH_SERVE_PORT", "many")
    words = ("serve", "--model", "m.onnx", "--galleries", str(tmp_path))
    assert "CROSSBATCH_SERVE_PORT" in sentence(capsys, *words)
    assert "m.onnx" in sentence(capsys, *words, "--port", "1024")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("MAXBATCH", "did you mean CROSSBATCH_SERVE_MAX_BATCH? "),
        ("MODELS", "did you mean CROSSBATCH_SERVE_MODEL? "),
        ("Z" * 27, "no setting; `crossbatch serve --help` lists all."),
    ],
)
def test_a_variable_that_is_no_setting_of_the_command_names_the_nearest(
    name: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"CROSSBATCH_SERVE_{name}", "8")
    said = sentence(capsys, "serve", "--model", "m.onnx", "--galleries", "g")
    assert f"CROSSBATCH_SERVE_{name}" in said
    assert says in said


@pytest.mark.parametrize("variable", ["CROSSBATCH_GALLERIES", "CROSSBATCH_GALERY_GALLERIES"])
def test_a_variable_that_lacks_the_command_is_told(
    variable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "elsewhere")
    monkeypatch.setenv("CROSSBATCH_GALLERY_GALLERIES", str(tmp_path))
    assert crossbatch.main(["gallery", "list"]) == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"the environment variable {variable} is not read; CROSSBATCH_GALLERY_GALLERIES would be"


def test_variables_of_other_commands_of_other_programs_and_of_kubernetes_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CROSSBATCH_SERVE_NONSENSE": "1",
        "CROSSBATCH_HOME": "/opt",
        "CROSSBATCH_GALLERIES_PORT": "tcp://10.0.0.1:50051",
        "CROSSBATCH_GALLERY_PORT": "tcp://10.0.0.1:50051",
        "CROSSBATCH_GALLERY_SERVICE_HOST": "10.0.0.1",
        "CROSSBATCH_GALLERY_SERVICE_PORT_GRPC": "50051",
        "CROSSBATCH_GALLERY_PORT_50051_TCP_ADDR": "10.0.0.1",
        "CROSSBATCH_GALLERY_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    }.items():
        monkeypatch.setenv(name, value)
    assert crossbatch.main(["gallery", "list", "--galleries", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_of_processes_that_torchrun_started_the_first_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables, shown in (("RANK", "no gallery\n"), ("RANK TORCHELASTIC_RUN_ID", "")):
        for name in variables.split():
            monkeypatch.setenv(name, "1")
        assert crossbatch.main(["gallery", "list", "--galleries", str(tmp_path)]) == 0
        assert (capsys.readouterr().out, progress((), "Reading").disable) == (shown, not shown)


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "crossbatch"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_that_lacks_letters_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert crossbatch.main(["train", "cub100-contrastive-xml", "--list"]) == 0
    assert b"G\\xfcrb\\xfcz" in terminal.buffer.getvalue()


def test_closed_standard_error_is_no_error() -> None:
    words = f"exec {sys.executable} -m crossbatch trian 2>&-"
    assert subprocess.run(["sh", "-c", words], check=False).returncode == 2
