"""Pack a few JSON files as one archive whose bytes depend on nothing else; and unpack an archive that anybody may have made.

The archive is a zip file whose members are stored, not compressed: they cannot unpack to more than its size, zlib's
version does not matter, and version control compresses it anyway. No file is ever written under a name from an archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from tuned.lookup.record import parsed, shown

from ..places import PROGRAM

MOST_BYTES = 16 * 2**20  # of an archive: 50 times the record of an H200
MOST_FILES = 8
NAME = re.compile(r"[a-z0-9_]{1,200}\.json")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that zip knows
MANIFEST, FORMAT, SCHEMA = "manifest.json", "tuned-contribution", 1
AGAIN = f"make it again with {PROGRAM} submit"


class ArchiveError(ValueError):
    """The file is not an archive that this project made; the message states the rule, the value and the way out."""


# Writing --------------------------------------------------------------------------------------------------------------


def digest_of(files: Mapping[str, bytes]) -> str:
    """One sha256 over the files: the sha256 of the output of ``sha256sum *.json``, sorted by name."""
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def signed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files and their manifest."""
    sums = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}
    content = {"format": FORMAT, "schema": SCHEMA, "digest": digest_of(files), "files": sums}
    return {**files, MANIFEST: (json.dumps(content, indent=1) + "\n").encode()}


def packed(files: Mapping[str, bytes]) -> bytes:
    """The archive of some files; the same files, the same bytes, on any machine."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name, EPOCH)
            member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # as on Unix
            archive.writestr(member, files[name])
    return made.getvalue()


# Reading --------------------------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of an archive without the manifest, after comparing them with the digests of the manifest.

    Raises:
        ArchiveError: this project did not make the archive, or it was changed since.
    """
    files = _members(data)
    if packed(files) != data:
        raise ArchiveError(
            f"the archive must hold its files and nothing else, and there are other bytes in it: {AGAIN}"
        )
    manifest = files.pop(MANIFEST, None)
    if manifest is None:
        raise ArchiveError(
            f"the archive must have a {MANIFEST}, it has {', '.join(sorted(files)) or 'nothing'}: {AGAIN}"
        )
    _compare(read_json(manifest, MANIFEST), files)
    return files


def read_json(data: bytes, name: str) -> Any:
    """The value of a JSON file of an archive.

    Raises:
        ArchiveError: the file is not valid JSON.
    """
    try:
        return parsed(data.decode("utf-8"))
    except ValueError as error:
        raise ArchiveError(f"{name} is not whole JSON ({error}): {AGAIN}") from error


def _members(data: bytes) -> dict[str, bytes]:
    if len(data) > MOST_BYTES:
        raise ArchiveError(f"an archive has at most {MOST_BYTES} bytes, got more: submit the record of one device")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_all(members)
            return {member.filename: archive.read(member) for member in members}
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises what struct, zlib and its own checks raise
        why = shown(str(error))  # the message may quote bytes of the archive
        raise ArchiveError(f"an archive is a whole zip file, got one that cannot be read ({why}): {AGAIN}") from error


def _check_all(members: Sequence[zipfile.ZipInfo]) -> None:
    if len(members) > MOST_FILES:
        raise ArchiveError(f"an archive has at most {MOST_FILES} files, got {len(members)}: {AGAIN}")
    for member in members:
        _check(member)
    names = sorted(member.filename for member in members)
    if len(set(names)) != len(names):
        raise ArchiveError(f"each file is in an archive once, got {', '.join(names)}: {AGAIN}")


def _check(member: zipfile.ZipInfo) -> None:
    name = shown(member.orig_filename)
    if NAME.fullmatch(member.orig_filename) is None:
        raise ArchiveError(
            f"a file of an archive has a name of small letters, digits and _ that ends in .json, and no folder, got {name}: {AGAIN}"
        )
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ArchiveError(f"an archive holds plain files, and {name} is a link or something else: {AGAIN}")
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ArchiveError(f"the files of an archive are stored, and {name} is compressed or encrypted: {AGAIN}")
    if member.file_size > MOST_BYTES:
        raise ArchiveError(
            f"a file of an archive has at most {MOST_BYTES} bytes, {name} says {member.file_size}: {AGAIN}"
        )


def _compare(manifest: Any, files: Mapping[str, bytes]) -> None:
    """Raise an ArchiveError unless the files are those that the manifest lists."""
    keys = ("format", "schema", "digest", "files")
    if not isinstance(manifest, dict) or sorted(manifest) != sorted(keys) or not isinstance(manifest["files"], dict):
        raise ArchiveError(f"{MANIFEST} must be an object with the fields {', '.join(keys)}: {AGAIN}")
    if (manifest["format"], manifest["schema"]) != (FORMAT, SCHEMA):
        raise ArchiveError(
            f"{MANIFEST} must have the format {FORMAT!r} and the schema {SCHEMA}, got {shown(manifest['format'])} and "
            f"{shown(manifest['schema'])}: make it with this version of {PROGRAM} submit"
        )
    if set(manifest["files"]) != set(files):
        raise ArchiveError(f"{MANIFEST} must name the files {', '.join(sorted(files))} and no others: {AGAIN}")
    for name in sorted(files):
        found = hashlib.sha256(files[name]).hexdigest()
        if manifest["files"][name] != found:
            raise ArchiveError(
                f"{name} must have the sha256 of the manifest, {shown(manifest['files'][name])}, and has {found}: it was "
                f"changed since it was made: {AGAIN}"
            )
    if manifest["digest"] != digest_of(files):
        raise ArchiveError(
            f"the digest of the manifest must be that of its files, {digest_of(files)}, got {shown(manifest['digest'])}: {AGAIN}"
        )
