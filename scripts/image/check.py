"""Builds a target of the Dockerfile without Docker, on a Debian made by debootstrap, and serves from it.

    scripts/image/check.py [cpu|gpu]

Needs Linux, root and debootstrap. It serves as the image's user, without capabilities, in a network of its
own, from folders mounted read-only. The image's health check has to pass, and a call and a search to be
answered.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # of this machine, whose network may have its own
TRUSTED = "/run/certificates.crt"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
READY_SECONDS = 60
IGNORED = shutil.ignore_patterns("__pycache__")

MAKE = """
import sys
from pathlib import Path
sys.path.append("/checkout")
from PIL import Image
from tests.tiny_model import write_tiny_model
for folder in ("models", "photos/red", "photos/blue"):
    Path("/", folder).mkdir(parents=True)
for number in range(8):
    for colour in ("red", "blue"):
        Image.new("RGB", (32, 32), colour).save(f"/photos/{colour}/{number}.png")
write_tiny_model(Path("/models/tiny.onnx"))
"""
USE = """
import os
from importlib.util import find_spec
from pathlib import Path
from serving.client import Client
assert find_spec("torch") is None, "torch is in the image"
assert os.getuid() > 0 and os.getgid() > 0
for folder in ("/", "/opt/crossbatch", "/models", "/galleries/shop"):
    try:
        Path(folder, "new").touch()
    except OSError as error:
        assert error.errno == 30, error  # a file system that is read-only
    else:
        raise AssertionError(f"{folder} can be written")
with Client("127.0.0.1:50051") as client:
    photo = Path("/photos/blue/3.png")
    assert client.embed([photo]).shape == (1, 3)
    labels = {hit.label for hit in client.search("shop", images=[photo], k=8)[0]}
    assert labels == {"blue"}, labels
    print("answered: an embedding, and a search for blue by", labels)
"""


@dataclass
class Image:
    """What a stage of the Dockerfile has made."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


def stages(text: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Read a Dockerfile: each stage with what it is made from, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, lines.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            steps: list[tuple[str, str]] = []
            found[name] = base, steps
        else:
            steps.append((word, rest))
    return found


def build(name: str, work: Path, made: dict[str, Image]) -> Image:
    """Carry out a stage, after those that it needs."""
    read = stages((ROOT / "Dockerfile").read_text())
    if name not in read:  # the image that all of it begins with
        return made["clean"]
    if name in made:
        return made[name]
    base, steps = read[name]
    before = build(base, work, made)
    image = made[name] = replace(before, root=work / name, environment=dict(before.environment))
    subprocess.run(["cp", "--archive", before.root, image.root], check=True)  # with its devices
    for word, rest in steps:
        print(f"{name}: {word} {rest}"[:150], flush=True)
        match word:
            case "RUN":
                mount = re.match(r"--mount=type=bind,source=(\S+),target=(\S+) ", rest)
                mounts = {mount[2]: ROOT / mount[1]} if mount else {}
                command = rest[mount.end() :] if mount else rest
                run(image, ["sh", "-c", f"cd {image.folder} && {command}"], mounts)
            case "COPY":
                *sources, target = rest.split()
                place = image.root / os.path.join(image.folder, target)[1:]
                root = ROOT
                if sources[0].startswith("--from="):
                    root = build(sources.pop(0).removeprefix("--from="), work, made).root
                for source in (root / each.lstrip("/") for each in sources):
                    if source.is_dir():
                        shutil.copytree(source, place, symlinks=True, ignore=IGNORED)
                    else:
                        shutil.copy2(source, place)
            case "WORKDIR":
                image.folder = rest
                (image.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.environment |= dict(each.split("=", 1) for each in shlex.split(rest))
            case "USER":
                image.user = rest
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case "HEALTHCHECK":
                image.health = json.loads(rest.partition("CMD ")[2])
            case "LABEL" | "EXPOSE":
                pass
            case _:
                raise SystemExit(f"scripts/image/check.py does not know {word}")
    return image


def run(image: Image, command: list[str], mounts: dict[str, Path]) -> None:
    """Run a command in an image as root, with files of this machine mounted."""
    mounts = {"/etc/resolv.conf": Path("/etc/resolv.conf"), TRUSTED: CERTIFICATES, **mounts}
    lines = ["set -e", f"mount -t proc proc {image.root}/proc"]
    for target, source in mounts.items():
        place = image.root / target[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(exist_ok=True) if source.is_dir() else place.touch()
        lines.append(shlex.join(["mount", "--bind", str(source), str(place)]))
    given = {name: value for name, value in os.environ.items() if name.endswith("INDEX_URL")}  # of pip
    environment = image.environment | given | {"PIP_CERT": TRUSTED}
    lines.append(shlex.join(["chroot", str(image.root), "env", "-i", *words(environment), *command]))
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(lines)], check=True, stdout=subprocess.DEVNULL
    )


def words(environment: dict[str, str]) -> Iterator[str]:
    """Write an environment as `env` takes it."""
    return (f"{name}={value}" for name, value in environment.items())


def serve(image: Image) -> None:
    """Serve a gallery from an image that nobody can write to, and use it."""
    run(image, ["python", "-c", MAKE], {"/checkout": ROOT})
    index = "index --model /models/tiny.onnx --data /photos /galleries/shop"
    run(image, [image.entrypoint[0], *index.split()], {})
    root, (user, group) = str(image.root), image.user.split(":")
    inside = (
        f"chroot {root} setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs "
        f"--bounding-set=-all env -i {shlex.join(words(image.environment))}"
    )
    flags = "--model /models --galleries /galleries --host 0.0.0.0 --insecure --workers 2 --metrics-port 9464"
    script = f"""
        set -e
        ip link set lo up
        mount --bind {root} {root}
        mount -t proc proc {root}/proc
        mount --rbind /dev {root}/dev
        mount -t tmpfs -o size=64m,mode=1777 tmpfs {root}{image.environment["HOME"]}
        mount -o remount,bind,ro {root}
        {inside} {shlex.join([*image.entrypoint, *flags.split()])} &
        server=$!
        seconds=0
        until {inside} {shlex.join(image.health)}; do
            seconds=$((seconds + 1))
            test $seconds -lt {READY_SECONDS}
            sleep 1
        done
        echo "the health check passes"
        {inside} python -c {shlex.quote(USE)}
        kill $server
        wait $server
        echo "stopped with status 0"
    """
    # Processes, mounts and addresses of its own, which end with it.
    spaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    subprocess.run([*spaces, "sh", "-c", script], check=True)


def check_libraries(image: Image) -> None:
    """Check that what ONNX Runtime needs of CUDA is in the image, but the driver, which the machine has."""
    for folder in image.environment["LD_LIBRARY_PATH"].split(":"):
        if not list(image.root.glob(f"{folder[1:]}/*.so*")):
            raise SystemExit(f"LD_LIBRARY_PATH names {folder}, and there is no library in it")
    packages = image.root.glob("opt/crossbatch/lib/*/site-packages")
    library = next(packages).relative_to(image.root) / "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    inside = ["chroot", image.root, "env", *words(image.environment), "ldd", f"/{library}"]
    told = subprocess.run(inside, check=True, capture_output=True, text=True).stdout
    missing = re.findall(r"(\S+) => not found", told)
    if set(missing) - {"libcuda.so.1"}:
        raise SystemExit(f"the image lacks {', '.join(missing)}")
    print(*re.findall(r"lib(?:cu|nv)\S+", told), "missing:", *missing)


def main(target: str) -> None:
    """Build a target and use it."""
    began = time.monotonic()
    if os.geteuid() or not shutil.which("debootstrap"):
        raise SystemExit("scripts/image/check.py needs root and debootstrap: apt-get install debootstrap")
    work = Path(tempfile.mkdtemp(prefix="crossbatch-image-"))
    try:
        clean = Image(work / "clean")
        debian = ["debootstrap", "--variant=minbase", SUITE, clean.root, MIRROR]
        subprocess.run(debian, check=True, stdout=subprocess.DEVNULL)
        image = build(target, work, {"clean": clean})
        if target == "gpu":
            check_libraries(image)
        serve(image)
        prefix = image.root / "opt/crossbatch"
        print((prefix / "contents.txt").read_text(), end="")
        size = sum(each.lstat().st_size for each in prefix.rglob("*"))
        took = time.monotonic() - began
        print(f"{prefix.relative_to(image.root)} holds {size / 1e6:,.0f} MB; {took:.0f} s")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cpu"]))
