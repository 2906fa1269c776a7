"""Refuse to overwrite tensors whose elements share memory, within one tensor or between two."""

from __future__ import annotations

import torch

wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public way to ask


def check_strides(name: str, x: torch.Tensor, way_out: str = "use inplace=False") -> None:
    """Refuse to overwrite a tensor whose elements share memory.

    Raises:
        ValueError: some of its elements share memory.
    """
    if not x.numel():  # elementwise results of empty tensors have strides of 0
        return
    if any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"{name} cannot be overwritten: some of its elements share memory (stride 0); {way_out}")
    if not torch.compiler.is_dynamo_compiling() and _shares_with_itself(x):
        raise ValueError(
            f"{name} cannot be overwritten: some of its elements share memory (strides {list(x.stride())} of {list(x.shape)}); {way_out}"
        )


def _shares_with_itself(x: torch.Tensor) -> bool:
    """Whether two elements of a tensor, which is not empty and has no stride of 0, lie in one place."""
    axes = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    reach, apart = 0, True
    for step, n in axes:
        apart = apart and step > reach
        reach += (n - 1) * step
    # More elements than places, such as windows that overlap by much, need no search.
    return not apart and (x.numel() > reach + 1 or _leads_back(axes[::-1], 0, moved=False))


def _leads_back(axes: list[tuple[int, int]], at: int, *, moved: bool) -> bool:
    """Whether steps along axes, the longest first, lead from ``at`` to 0: one or more, if none was made before (``moved``)."""
    if not axes:
        return moved and at == 0
    (step, n), *rest = axes
    reach = sum((m - 1) * s for s, m in rest)  # of the shorter axes: steps that these cannot make up for are not tried
    fewest, most = max(1 - n, -((reach + at) // step)), min(n - 1, (reach - at) // step)
    return any(_leads_back(rest, at + k * step, moved=moved or k != 0) for k in range(fewest, most + 1))


def refuse_overlap(
    x: torch.Tensor, key: torch.Tensor, names: str = "q and k", way_out: str = "use inplace=False"
) -> None:
    """Refuse to overwrite two tensors that overlap in memory.

    Raises:
        ValueError: an element of one shares memory with an element of the other.
    """
    if not x.numel() or not key.numel() or x.is_meta or torch.compiler.is_dynamo_compiling():  # no memory, or not yet
        return
    between = _bytes_between(x, key)
    if between is None:
        return
    first, second = (x, key) if between >= 0 else (key, x)
    between, parts = divmod(abs(between), x.element_size())
    lies = zip(first.stride(), first.shape, second.stride(), second.shape, strict=True)
    axes = [
        (t if n == 1 else s, n, s if m == 1 else t, m) for s, n, t, m in lies
    ]  # an axis of length 1 may have any stride
    if sum((n - 1) * s for s, n, _, _ in axes) < between:
        return
    # Interleaved views with equal strides, such as q and k of a packed qkv: along the axes whose stride is at most the
    # distance between the tensors, the first must end before the second begins; longer strides must step past both.
    axes = [axis for axis in axes if max(axis[1], axis[3]) > 1]
    alike = not parts and all(s == t for s, _, t, _ in axes)
    short = [axis for axis in axes if axis[0] <= between]
    alike = alike and sum((n - 1) * s for s, n, _, _ in short) < between  # not &: torch.jit.trace follows lengths
    reach = between + sum((m - 1) * t for _, _, t, m in short)
    for s, n, _, m in sorted(axis for axis in axes if axis[0] > between):
        alike = alike and s > reach
        reach += (max(n, m) - 1) * s
    if not alike and _share(first, second, between * x.element_size() + parts):
        raise ValueError(f"{names} share memory, and both would be overwritten: {way_out}")


def _bytes_between(x: torch.Tensor, key: torch.Tensor) -> int | None:
    """Bytes from the first element of x to that of the key; None if they cannot share memory.

    It compares addresses, since two storages may cover the same memory. A tensor that a transform of torch.func follows has
    the address of the tensor inside. A tensor without an address, such as a tracer's, is compared by its storage.
    """
    try:
        address, other = x.data_ptr(), key.data_ptr()
    except RuntimeError:
        address = other = 0
    if address and other:
        return other - address
    if _follows(x) or _follows(key):
        return _bytes_between(_inside(x), _inside(key))
    if x.untyped_storage()._cdata != key.untyped_storage()._cdata:  # noqa: SLF001 - the storage itself: it has no address
        return None
    return int(key.storage_offset() - x.storage_offset()) * x.element_size()


def _follows(t: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform, and wraps another tensor."""
    return wrapped(t) or torch._is_functional_tensor(t)  # noqa: SLF001 - no public way to ask


def _inside(t: torch.Tensor) -> torch.Tensor:
    """The innermost tensor that transforms wrap."""
    while _follows(t):
        t = torch._C._functorch.get_unwrapped(t)  # noqa: SLF001 - no public way to ask
    return t


def _share(first: torch.Tensor, second: torch.Tensor, between: int) -> bool:
    """Whether elements of both share memory, by all addresses, where strides do not tell; ``between``: bytes from first to second."""
    size = first.element_size()
    starts = []
    for axes, begin in zip(_within_a_row(first, second, between), (0, between), strict=True):
        addresses = torch.full((), begin, dtype=torch.int64, device="cpu")
        for step, n in axes:
            addresses = addresses[..., None] + torch.arange(n, device="cpu") * step
        starts.append(addresses.flatten())
    one, other = starts
    # Elements of the same dtype overlap if their addresses differ by less than its size.
    shifts = (0,) if between % size == 0 else range(1 - size, size)
    return any(bool(torch.isin(one + shift, other).any()) for shift in shifts)


def _within_a_row(first: torch.Tensor, second: torch.Tensor, between: int) -> list[list[tuple[int, int]]]:
    """The axes of two tensors, as (bytes, length), along which elements of both may meet.

    A step that is longer than all that the shorter steps of both tensors reach over leads to another row, whose elements meet none of
    a row before. So such axes are left out: comparing within one row is enough.
    """
    size = first.element_size()
    axes = [
        sorted((step * size, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1) for t in (first, second)
    ]
    while any(axes):
        longest = max(own[-1] for own in axes if own)[0]
        shorter = [own[:-1] if own and own[-1][0] == longest else own for own in axes]
        one, other = (sum((n - 1) * step for step, n in own) for own in shorter)
        if longest < size + max(abs(between - one), abs(between + other)):
            break
        axes = shorter
    return axes
