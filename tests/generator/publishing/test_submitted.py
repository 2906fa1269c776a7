"""Every contribution in this checkout is judged, so that its sender sees the verdict in the pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from generator.places import CONTRIBUTIONS
from generator.publishing.contribution import KERNELS, made, read_archive, verdict
from generator.storage.record import read_record

if TYPE_CHECKING:
    import concurrent.futures
    from pathlib import Path

ARCHIVES = sorted(path for path in CONTRIBUTIONS.glob("**/*") if path.suffix != ".md" and path.is_file())


@pytest.mark.compiler
@pytest.mark.processes
def test_every_contribution_is_accepted(compiler: concurrent.futures.Executor) -> None:
    for path in ARCHIVES:
        found = verdict(read_archive(path), compiler, KERNELS)
        assert found.reasons == (), "\n".join((path.name, *found.reasons))
        assert found.contribution is not None
        assert path.name == f"{found.contribution.name}.zip", "an archive is called by its device and its digest"


@pytest.mark.compiler
def test_one_of_our_own_compiles(compiler: concurrent.futures.Executor, tmp_path: Path) -> None:
    rows = [w for w in read_record("nvidia_h200") if w.name in {"llama3_8b_2x4096", "dreamer"}]
    data, one = made(rows)
    path = tmp_path / f"{one.name}.zip"
    path.write_bytes(data)
    found = verdict(read_archive(path), compiler, 1)
    assert found.reasons == ()
    assert len(found.compiled) == 1
