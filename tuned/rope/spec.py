"""RopeSpec: what a caller of RoPE asks for, and nothing that tuning may change."""

from __future__ import annotations

import dataclasses

DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # bytes
LAYOUTS = ("sbhd", "bshd", "thd")
STYLES = ("half", "interleaved")
ANGLES = ("freqs", "cos_sin")
ANGLE_ENTRIES = ("feature", "pair")
DIRECTIONS = ("forward", "backward")
SEARCH_FAN = 64  # one wait for memory finds a token among 63 sequences, two among 4095


def search_steps(sequences: int) -> int:
    """How many steps find a place among ``sequences`` + 1 bounds, SEARCH_FAN at a time."""
    steps = 1
    while SEARCH_FAN**steps <= sequences:
        steps += 1
    return steps


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """One way of calling RoPE, whatever the number of tokens.

    Out of place, the features past ``rotary_dim`` are copied; in place they are not touched.
    """

    layout: str  # sbhd [s, b, h, d], bshd [b, s, h, d] or thd [t, h, d] with cu_seqlens
    dtype: str  # of x and of the result
    heads: int
    head_dim: int
    rotary_dim: int  # leading features that rotate; even
    style: str = "half"  # pair (j, j + rotary_dim / 2), NeoX; or "interleaved": (2 j, 2 j + 1), GPT-J
    angles: str = "freqs"  # radians, float32; or "cos_sin": two tensors, already taken
    angle_dtype: str = "float32"
    angle_entries: str = "pair"  # width rotary_dim / 2; or "feature": width rotary_dim, entries of a pair may differ
    inplace: bool = False
    direction: str = "forward"  # or "backward": the transpose of the forward map, applied to grad_output

    def __post_init__(self) -> None:
        for name, allowed in (
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
            ("style", STYLES),
            ("angles", ANGLES),
            ("angle_dtype", tuple(ITEM_SIZE)),
            ("angle_entries", ANGLE_ENTRIES),
            ("direction", DIRECTIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim must be even and in (0, {self.head_dim}], got {self.rotary_dim}")
        if self.inplace and self.direction == "backward":
            raise ValueError("backward is always out of place: grad_output may be shared and is never written")

    @property
    def copies_tail(self) -> bool:
        """Out of place, the features that do not rotate must still reach the output."""
        return not self.inplace and self.rotary_dim < self.head_dim

    @property
    def packed(self) -> bool:
        """Tokens of all sequences on one axis: positions come from cu_seqlens."""
        return self.layout == "thd"

    @property
    def merges_batch(self) -> bool:
        """In sbhd the b * h rows of one position lie together and share its angles: one axis of rows."""
        return self.layout == "sbhd"

    @property
    def interleaved(self) -> bool:
        """The two features of a pair are neighbours."""
        return self.style == "interleaved"

    @property
    def takes_sine(self) -> bool:
        """The kernel is given radians and takes sine and cosine itself."""
        return self.angles == "freqs"

    @property
    def angle_arguments(self) -> str:
        """The kernel's angle parameters, as the arguments of a call."""
        return "freqs" if self.takes_sine else "cos, sin"

    @property
    def skips_padding(self) -> bool:
        """Packed and in place: tokens that no sequence holds stay as they are, unwritten."""
        return self.packed and self.inplace

    @property
    def copies_padding(self) -> bool:
        """Packed and out of place: tokens that no sequence holds are copied."""
        return self.packed and not self.inplace

    @property
    def and_tail(self) -> str:
        """What a docstring of the kernel adds where the tail is copied."""
        return ", and the tail" if self.copies_tail else ""

    @property
    def output(self) -> str:
        """Where the result goes, as a word of the kernel's name."""
        if self.inplace:
            return "inplace"
        return "copytail" if self.copies_tail else "copy"

    @property
    def summary(self) -> str:
        """One sentence for the head of the generated module."""
        place = {
            "inplace": "in place; features that do not rotate are not touched",
            "copy": "out of place; every feature rotates",
            "copytail": "out of place; features that do not rotate are copied",
        }[self.output]
        angle = "sine and cosine taken here" if self.takes_sine else "cosine and sine given"
        return f"RoPE, {self.layout}, {self.style} pairs, {place}; {angle}."

    def bytes_per_token(self) -> int:
        """Bytes of x that must be read and written for one token, angles not counted."""
        features = self.rotary_dim if self.inplace else self.head_dim
        return 2 * self.heads * features * ITEM_SIZE[self.dtype]

    def bytes_per_position(self) -> int:
        """Bytes of angles that must be read for one position, shared by the batch."""
        entries = self.rotary_dim if self.angle_entries == "feature" else self.rotary_dim // 2
        return entries * ITEM_SIZE[self.angle_dtype] * (1 if self.takes_sine else 2)


@dataclasses.dataclass(frozen=True)
class RopeSize:
    """How much of it: what a kernel serves at run time without being compiled again."""

    batch: int  # sequences; in thd the number of packed ones
    seq: int  # tokens a sequence; in thd the mean

    @property
    def tokens(self) -> int:
        """All tokens of the call."""
        return self.batch * self.seq
