"""Envoy in front of servers, as deploy/envoy/replicas.yaml has it."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.driving.ports import free_ports
from benchmarks.driving.served import ROOT, Failed

__all__ = ["CONFIG", "Host", "Proxy", "proxied"]

CONFIG: Final = ROOT / "deploy/envoy/replicas.yaml"
_PATIENCE: Final = 20.0  # seconds for Envoy to start and to find the servers healthy


@dataclass(frozen=True)
class Host:
    """A server as Envoy sees it."""

    healthy: bool
    calls: int
    """Sent to it so far."""


@dataclass(frozen=True)
class Proxy:
    """Envoy at work."""

    address: str
    admin: str
    pid: int

    def hosts(self) -> dict[str, Host]:
        """Return the replicas by their addresses."""
        (cluster,) = [
            each
            for each in json.loads(self._asked("clusters?format=json"))["cluster_statuses"]
            if each["name"] == "replicas"
        ]
        found = {}
        for host in cluster.get("host_statuses", []):
            place = host["address"]["socket_address"]
            calls = next(int(each.get("value", 0)) for each in host["stats"] if each["name"] == "rq_total")
            faults = host["health_status"].keys() - {"eds_health_status"}
            found[f"{place['address']}:{place['port_value']}"] = Host(not faults, calls)
        return found

    def count(self, name: str) -> int:
        """Return one of the counters that Envoy keeps of the replicas, such as `upstream_rq_retry`."""
        line = self._asked(f"stats?filter=^cluster.replicas.{name}$")
        return int(line.rpartition(":")[2] or 0)

    def _asked(self, what: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}/{what}", timeout=10) as reply:
            text: str = reply.read().decode()
            return text


@contextmanager
def proxied(folder: Path, servers: Sequence[str], *, writer: str = "") -> Iterator[Proxy]:
    """Start Envoy in front of servers of this machine, and wait until it finds all of them healthy.

    Args:
        folder: For its configuration and its log.
        servers: Their addresses.
        writer: That of the one that writes; the first of them when empty.

    Raises:
        Failed: It does not start, or does not find them healthy.
    """
    listening, admin = free_ports(2)
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    _move(config["admin"], f"127.0.0.1:{admin}")
    _move(config["static_resources"]["listeners"][0], f"127.0.0.1:{listening}")
    for cluster, addresses in zip(
        config["static_resources"]["clusters"], (servers, [writer or servers[0]]), strict=True
    ):
        endpoints = [_move({}, address) for address in addresses]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": at} for at in endpoints]}]
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--disable-hot-restart"]
    command += ["--concurrency", "1", "--log-level", "warning", "--log-path", str(folder / "envoy.log")]
    with subprocess.Popen(command) as process:
        try:
            proxy = Proxy(f"127.0.0.1:{listening}", f"127.0.0.1:{admin}", process.pid)
            _wait(proxy, process, folder / "envoy.log")
            yield proxy
        finally:
            process.kill()


def _move(place: dict[str, Any], address: str) -> dict[str, Any]:
    """Give an Envoy listener or endpoint an address."""
    host, _, port = address.rpartition(":")
    place["address"] = {"socket_address": {"address": host, "port_value": int(port)}}
    return place


def _wait(proxy: Proxy, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if (hosts := proxy.hosts()) and all(host.healthy for host in hosts.values()):
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.05)
    said = log.read_text().strip().splitlines() if log.exists() else []
    raise Failed(f"Envoy does not find the servers healthy: {said[-1] if said else 'it says nothing'}")
