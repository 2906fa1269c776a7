"""Install what pip was asked for, with uv where that works and with pip where not: ``python .ci/install.py -e .``.

uv unpacks gigabytes in a third of pip's time. It reads no configuration of pip's, so it is told of pip's indexes here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(".cache/uv").resolve()  # beside the environments, so that files are linked and not copied
LISTS = ("extra-index-url", "find-links")
UV = "uv==0.13.9"


def settings() -> dict[str, str]:
    """What pip is configured with: of files, then of the environment, which has the last word."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(pip, check=True, capture_output=True, text=True).stdout.splitlines()
    pairs = [line.partition("=")[::2] for line in lines]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, value in pairs}


def with_uv(arguments: list[str]) -> bool:
    """Whether uv did it."""
    program = CACHE / "program" / "bin" / "uv"
    if not program.exists():
        command = ["-m", "pip", "install", "-q", "--target", str(program.parents[1]), UV]
        subprocess.run([sys.executable, *command], check=True)
    known = settings()
    options = [f"--{name}={value}" for name in LISTS for value in known.get(name, "").split()]
    options += [f"--index-url={known['index-url']}"] if "index-url" in known else []
    options += ["--no-index"] if known.get("no-index", "").lower() in {"1", "on", "true", "yes"} else []
    environment = {"UV_CACHE_DIR": str(CACHE / "cache"), "UV_HTTP_TIMEOUT": known.get("timeout", "60")} | os.environ
    if "cert" in known:
        environment.setdefault("SSL_CERT_FILE", known["cert"])
    # As pip does: the best version of all indexes, not that of the first which has any.
    options += ["--index-strategy=unsafe-best-match", f"--python={sys.executable}"]
    done = subprocess.run([str(program), "pip", "install", "-q", *options, *arguments], check=False, env=environment)
    return done.returncode == 0


def main() -> None:
    """Try uv, then pip."""
    arguments = sys.argv[1:]
    try:
        if with_uv(arguments):
            return
    except (OSError, subprocess.CalledProcessError, SyntaxError, ValueError) as error:
        print(error, file=sys.stderr)
    print("uv could not install it; pip does", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", *arguments]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
