"""The page's files, its headers and hosts, TLS, and the life of the process that serves it."""

import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import crossbatch
from serving.errors import BadSetting, Unavailable
from serving.server import command
from serving.settings import Settings
from serving.web.app import Page
from tests.serving.authority import Authority
from tests.serving.processes import ROOT, launched
from tests.serving.processes import command as words_of
from tests.serving.rpc_fakes import FakeEncoder, until
from tests.serving.web.pages import JSON, Browser, paged


def settings(**given: Any) -> Settings:
    return Settings.model_validate({"model": ["m"], "galleries": "g", "web_port": 0} | given)


@pytest.mark.parametrize(
    ("path", "media"),
    [
        ("/", "text/html"),
        ("/static/style.css", "text/css"),
        ("/palette.css", "text/css"),
        ("/static/app.js", "javascript"),
        ("/v1/galleries", "json"),
    ],
)
def test_each_reply_comes_with_the_headers_that_keep_it_safe(browser: Browser, path: str, media: str) -> None:
    status, headers, body = browser.ask("GET", path)
    assert status == 200
    assert body
    assert media in headers["content-type"]
    policy = dict(each.strip().partition(" ")[::2] for each in headers["content-security-policy"].split(";"))
    assert policy.pop("img-src") == "'self' blob: data:"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert {policy.pop(f"{kind}-src") for kind in ("script", "style", "connect")} == {"'self'"}
    assert policy.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == ("no-store" if path.startswith("/v1") else "no-cache")
    assert "server" not in headers


def test_a_file_that_the_browser_has_is_not_sent_again(browser: Browser) -> None:
    for path in ("/", "/static/app.js"):
        _, headers, _ = browser.ask("GET", path)
        assert browser.ask("GET", path, None, if_none_match=headers["etag"])[::2] == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static",
        "/nothing",
        "/index.html",
    ],
)
def test_no_other_file_is_shown(browser: Browser, path: str) -> None:
    status, _, body = browser.ask("GET", path)
    assert status in (307, 404)
    assert b"import" not in body
    assert browser.ask("POST", "/", b"{}", content_type="application/json")[0] == 405


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
        "localhost@evil",
    ],
)
def test_a_name_that_is_made_to_mean_this_machine_is_no_host(browser: Browser, host: str) -> None:
    for path in ("/", "/v1/galleries"):
        status, _, body = browser.ask("GET", path, None, host=host)
        assert status == 400, host
        assert b"gallery" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "[::1]"])
def test_this_machine_goes_by_several_names(browser: Browser, host: str) -> None:
    assert browser.ask("GET", "/", None, host=host)[0] == 200


def test_off_loopback_any_host_is_asked_for_and_plain_text_needs_leave(memory: Path) -> None:
    with pytest.raises(BadSetting, match="--insecure"):
        Page(settings(web_host="0.0.0.0"))
    with pytest.raises(BadSetting, match="--web-host"):
        Page(settings(web_host="no-such-host.invalid"))
    with paged(memory, web_host="0.0.0.0", insecure=True) as browser:
        assert browser.ask("GET", "/v1/galleries", None, host="shop.example")[0] == 200


def test_a_port_that_another_has_is_one_sentence(browser: Browser) -> None:
    with pytest.raises(Unavailable, match=f"Port {browser.port} .* in use.*--web-port"):
        Page(settings(web_port=browser.port))


def test_the_port_can_be_had_again_at_once(memory: Path) -> None:
    with paged(memory) as browser:
        port, open_one = browser.port, browser.connect()
        open_one.request("GET", "/")
        open_one.getresponse().read()
    with paged(memory, web_port=port) as browser:
        assert browser.ask("GET", "/")[0] == 200
    open_one.close()


def test_tls_is_that_of_the_server_and_renewed_with_it(tmp_path: Path, memory: Path) -> None:
    first, second = Authority("first"), Authority("second")
    certificate, key = first.sign("one").write(tmp_path)
    files = {"tls_certificate": certificate, "tls_key": key}
    with paged(memory, trust=first.certificate, **files) as browser:
        assert browser.place.scheme == "https"
        assert browser.ok("GET", "/v1/galleries") == {}
        second.sign("two").write(tmp_path)
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            browser.ask("GET", "/")
        renewed = Browser(f"https://127.0.0.1:{browser.port}/", second.certificate)
        assert renewed.ok("GET", "/v1/galleries") == {}
        key.write_bytes(b"half")
        assert renewed.ok("GET", "/v1/galleries") == {}
        certificate.write_bytes(b"half")
        assert renewed.ok("GET", "/v1/galleries") == {}


def test_certificates_of_clients_and_the_page_do_not_go_together() -> None:
    files = {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}
    with pytest.raises(ValidationError, match="--web-port cannot be had with --tls-client-ca"):
        settings(**files)


def test_without_its_packages_the_page_is_asked_for_in_vain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "configure_logs", lambda *_, **__: None)  # those of the tests stay
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "serving.web.app")
    words = ["serve", "--model", "m.onnx", "--galleries", str(tmp_path), "--port", "0", "--web-port", "0"]
    assert crossbatch.main(words) == 2
    assert "pip install 'crossbatch[web]'" in capsys.readouterr().err


def page_of(process: "subprocess.Popen[str]") -> Browser:
    assert process.stdout is not None
    found = re.fullmatch(r"page on (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
    assert found
    return Browser(found[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_tells_its_page_and_drains_it(model: Path, tmp_path: Path, workers: int) -> None:
    galleries = tmp_path / "galleries"
    galleries.mkdir()
    with launched(model, galleries, "--web-port", "0", "--workers", str(workers), "--json") as server:
        browser = page_of(server.process)
        assert browser.ask("GET", "/")[0] == 200
        browser.ok("POST", "/v1/galleries", {"name": "shoes"})
        assert [each["name"] for each in browser.ok("GET", "/v1/galleries")["galleries"]] == ["shoes"]
        idle = browser.connect()
        idle.request("GET", "/")
        idle.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        idle.close()
        assert server.process.stdout is not None
        assert f'"page": "http://127.0.0.1:{browser.port}/"' in server.process.stdout.read()
        text = server.errors.read_text()
        assert not [each for each in server.records() if each["level"] in ("WARNING", "ERROR")], text
        assert server.said("page on http://127.0.0.1")
        assert "Traceback" not in text


def test_a_call_that_runs_is_finished_while_the_server_stops(memory: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    told: list[int] = []
    with paged(memory, encoder) as browser:
        asking = threading.Thread(
            target=lambda: told.append(browser.call("POST", "/v1:embed", {"images": ["YQ=="]})[0])
        )
        asking.start()
        until(lambda: encoder.encoding)
        threading.Timer(0.5, encoder.encode_gate.set).start()
    asking.join()
    assert told == [200]


def test_what_is_not_done_when_the_grace_is_over_is_told(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    told: list[Any] = []
    with paged(memory, encoder, grace=0.2) as browser:
        asking = threading.Thread(
            target=lambda: told.append(browser.call("POST", "/v1:embed", {"images": ["YQ=="]}))
        )
        asking.start()
        until(lambda: encoder.encoding)
        with socket.create_connection(("127.0.0.1", browser.port)) as slow:
            head = "POST /v1:embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
            slow.sendall(f"{head}content-type: {JSON['content-type']}\r\n\r\n".encode())
            assert browser.ok("GET", "/v1/galleries") == {}
            threading.Timer(2.0, encoder.encode_gate.set).start()
    asking.join()
    assert told[0][0] == 503
    assert told[0][1]["details"][0]["reason"] == "DRAINING"
    assert "Traceback" not in caplog.text


def test_a_port_in_use_stops_the_start_before_anything(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = words_of(model, tmp_path, "--web-port", str(taken.getsockname()[1]))
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--web-port" in done.stderr
