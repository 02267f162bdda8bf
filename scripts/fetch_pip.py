"""Install pip from PyPI into the running environment, where Python came without ensurepip."""

import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

INDEX = "https://pypi.org/pypi/pip/json"

try:
    with urllib.request.urlopen(INDEX, timeout=60) as reply:
        wheel = next(file for file in json.load(reply)["urls"] if file["packagetype"] == "bdist_wheel")
    with urllib.request.urlopen(wheel["url"], timeout=60) as reply:  # noqa: S310 (the digest guards it)
        content = reply.read()
except OSError as error:
    sys.exit(f"scripts/fetch_pip.py: PyPI gave no pip ({error}); install python3-venv and ca-certificates")
if hashlib.sha256(content).hexdigest() != wheel["digests"]["sha256"]:
    sys.exit("scripts/fetch_pip.py: pip arrived damaged from PyPI; try again")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / wheel["filename"]
    path.write_bytes(content)
    subprocess.run([sys.executable, f"{path}/pip", "install", "--no-index", str(path)], check=True)
