"""Archives: the same bytes each time; and reading one that anybody may have made gives only what was written."""

from __future__ import annotations

import hashlib
import io
import json
import random
import stat
import subprocess
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from generator.publishing.archive import MANIFEST, MOST_BYTES, ArchiveError, digest_of, packed, signed, unpacked

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a.json": b'{"x": 1}\n', "some_gpu.json": b"[]\n"}
LONG, DEEP = "9" * 5000, "[" * 100_000 + "]" * 100_000


def refused(data: bytes) -> str:
    with pytest.raises(ArchiveError) as caught:
        unpacked(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def zipped(
    members: dict[str, bytes],
    compression: int = zipfile.ZIP_STORED,
    mode: int = stat.S_IFREG | 0o644,
    comment: bytes = b"",
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.comment = comment
        for name, content in members.items():
            member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr, member.compress_type = 3, mode << 16, compression
            archive.writestr(member, content)
    return made.getvalue()


def test_what_was_packed_is_what_is_read_and_its_bytes_are_known() -> None:
    data = packed(signed(FILES))
    assert unpacked(data) == FILES
    assert data == packed(signed(dict(reversed(FILES.items())))), "the order of the files changes nothing"
    assert hashlib.sha256(data).hexdigest() == "a5f93f44fd0c8080e717d520d4555b08dbe1f6ea9c45c0d605fb13cbaa97059f", (
        "other bytes on this machine, Python or version"
    )


def test_the_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    line = subprocess.run("sha256sum *.json | sha256sum", shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert line.stdout.split()[0].decode() == digest_of(FILES)


@pytest.mark.parametrize(
    "name", ["../a.json", "/etc/a.json", "a/b.json", "a\\b.json", "C:a.json", "a.py", ".json", "A.json", "a.json/", "é.json", "x" * 300]
)  # fmt: skip
def test_a_name_that_is_a_path_or_anything_but_a_record_is_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = zipped({name: b"{}"})
    assert "a file of an archive has a name of small letters" in refused(data)


def test_a_name_that_goes_on_after_a_null_is_refused() -> None:
    data = zipped({"a.json_.py": b"{}"}).replace(b"a.json_.py", b"a.json\0.py")
    assert "small letters" in refused(data)


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o644, stat.S_IFDIR | 0o755])
def test_links_pipes_and_folders_are_refused(mode: int) -> None:
    assert "an archive holds plain files" in refused(zipped({"a.json": b"/etc/passwd"}, mode=mode))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_is_refused_before_it_is_unpacked(compression: int) -> None:
    data = zipped({"a.json": bytes(4 * 2**20)}, compression)
    assert len(data) < 2**14
    assert "are stored, and 'a.json' is compressed" in refused(data)


def test_members_that_share_bytes_or_lie_about_their_size_are_refused() -> None:
    data = bytearray(zipped({"a.json": b"x" * 100}))
    at = data.index(b"PK\x01\x02") + 20  # in the central directory: compressed size, size
    for size in (50, 1000, 2**31):
        data[at : at + 8] = size.to_bytes(4, "little") * 2
        assert "archive" in refused(bytes(data))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "a whole zip file"),
        (b"PK\x05\x06", "a whole zip file"),
        (b"\x1f\x8b" + bytes(100), "a whole zip file"),
        (bytes(MOST_BYTES + 1), f"at most {MOST_BYTES} bytes"),
        (zipped({f"a{i}.json": b"" for i in range(9)}), "at most 8 files, got 9"),
        (zipped({}), f"must have a {MANIFEST}, it has nothing"),
        (packed(FILES), f"must have a {MANIFEST}, it has a.json, some_gpu.json"),
        (zipped(signed(FILES), comment=b"more"), "there are other bytes in it"),
        (b"#!/bin/sh\n" + packed(signed(FILES)), "there are other bytes in it"),
        (packed(signed(FILES)) + b"\0", "there are other bytes in it"),
        (packed(signed(FILES))[:-5], "a whole zip file"),
    ],
)  # fmt: skip
def test_what_is_no_archive_of_ours_is_refused(data: bytes, said: str) -> None:
    assert said in refused(data)


def test_one_name_twice_is_refused() -> None:
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("a.json", "1")
        archive.writestr("a.json", "2")
    assert "each file is in an archive once" in refused(made.getvalue())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", "zip", "must have the format 'tuned-contribution' and the schema 1"),
        ("schema", 2, "make it with this version"),
        ("schema", [[]], "make it with this version"),
        ("digest", "0" * 64, "the digest of the manifest must be that of its files"),
        ("digest", None, "the digest of the manifest must be that of its files"),
        ("files", {}, "must name the files a.json, some_gpu.json and no others"),
        ("files", ["a.json"], "must be an object with the fields"),
        ("files", {"a.json": "0" * 64, "some_gpu.json": ""}, "a.json must have the sha256 of the manifest"),
        ("more", 1, "must be an object with the fields"),
    ],
)
def test_a_manifest_that_is_of_other_files_is_refused(field: str, value: Any, said: str) -> None:
    manifest = json.loads(signed(FILES)[MANIFEST]) | {field: value}
    assert said in refused(packed({**FILES, MANIFEST: json.dumps(manifest).encode()}))


@pytest.mark.parametrize("text", ["", "{", LONG, DEEP, f'{{"digest": {LONG}}}', "null", "[]", "1e99999", "\ud800"])
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    assert MANIFEST in refused(packed({**FILES, MANIFEST: text.encode(errors="surrogatepass")}))


def test_a_file_that_was_changed_is_refused() -> None:
    files = {**signed(FILES), "a.json": b'{"x": 2}\n'}
    assert "a.json must have the sha256 of the manifest" in refused(packed(files))


@pytest.mark.parametrize("seed", range(4))
def test_any_change_of_a_byte_is_refused(seed: int) -> None:
    draw, whole = random.Random(seed), packed(signed(FILES))
    for _ in range(300):
        data = bytearray(whole)
        kind, at = draw.randrange(3), draw.randrange(len(whole))
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + draw.randint(1, 40)]
        else:
            data[at:at] = draw.randbytes(draw.randint(1, 40))
        if bytes(data) != whole:
            refused(bytes(data))
