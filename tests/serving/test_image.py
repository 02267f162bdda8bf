"""The Dockerfile: hadolint finds nothing, bases are pinned, each step is a script that can be tried alone.

`scripts/image/check.py` carries it out and serves from what comes of it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def lines(word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", TEXT, re.MULTILINE)


def test_hadolint_finds_nothing() -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), "--failure-threshold", "style", "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_base_is_pinned_and_both_targets_are_there() -> None:
    named = [line.split() for line in lines("FROM")]
    stages = {name for _, _, name in named}
    assert {"cpu", "gpu"} <= stages
    outside = [base for base, _, _ in named if base not in stages]
    assert outside
    for base in outside:
        assert re.fullmatch(r"[\w./-]+:[\w.-]*\d{8}[\w.-]*@sha256:[0-9a-f]{64}", base), base
    assert named[-1][2] == "cpu"  # what `docker build .` makes


def test_each_step_is_a_script() -> None:
    steps = lines("RUN")
    assert steps
    for step in steps:
        command = re.sub(
            r"^--mount=type=bind,source=scripts/image,target=/image /image/", "scripts/image/", step
        )
        script = re.fullmatch(r"(scripts/image/\w+)( [^;&|]*)?", command)
        assert script, step
        assert os.access(ROOT / script[1], os.X_OK)


def test_what_is_copied_is_let_through_and_nothing_else() -> None:
    copied = {name for line in lines("COPY") if "--from" not in line for name in line.split()[:-1]}
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    for name in copied:
        assert (ROOT / name).exists(), name


def test_kubernetes_runs_it_as_the_user_that_it_names() -> None:
    (user,) = lines("USER")
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/base/deployment.yaml").read_text())
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}" == "10001:10001"
    (tags,) = yaml.safe_load((ROOT / "deploy/kubernetes/base/kustomization.yaml").read_text())["images"]
    assert f"docker build -t {tags['name']}:{tags['newTag']} ." in TEXT
