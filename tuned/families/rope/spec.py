"""RopeSpec: what a caller of RoPE asks for, which tuning may not change."""

from __future__ import annotations

import dataclasses

DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # bytes
LAYOUTS = ("sbhd", "bshd", "thd")
STYLES = ("half", "interleaved")
ANGLES = ("freqs", "cos_sin", "inv_freq")
ANGLE_ENTRIES = ("feature", "pair")
DIRECTIONS = ("forward", "backward")
POSITIONS = ("order", "shifted", "offset", "starts", "ids", "axes")
ROTATED = ("first", "last", "proportional")
MOST_AXES = 4  # of positions
NORMS = ("", "head", "all")
ROUNDINGS = ("once", "product", "each")
CACHES = ("", "same", "float8")
CACHE_LAYOUTS = ("NHD", "HND")
# The fields that tell a complete call from a plain one, and their values in a plain one.
COMPLETE = (
    "key_heads", "copied_heads", "positions", "context_parallel", "rotated", "conjugate", "scaled", "angles_per_batch", "norm",
)  # fmt: skip
PLAIN = (0, 0, "order", False, "first", False, False, False, "")
SEARCH_FAN = 64  # one round of loads finds a token's sequence among 63, two rounds among 4095


def search_steps(sequences: int) -> int:
    """How many steps of a search that compares SEARCH_FAN bounds at a time find a sequence among ``sequences``."""
    steps = 1
    while SEARCH_FAN**steps <= sequences:
        steps += 1
    return steps


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """One way of calling RoPE, for any number of tokens.

    Out of place, the features that do not rotate are copied; in place they are not touched, unless a norm writes them. A spec that leaves the fields
    from ``key_heads`` on at their defaults, and does not use "inv_freq", is ``plain``; others are complete.
    """

    layout: str  # sbhd [s, b, h, d], bshd [b, s, h, d] or thd [t, h, d] with cu_seqlens
    dtype: str  # of x and of the result
    heads: int
    head_dim: int
    rotary_dim: int  # features that rotate; even
    style: str = "half"  # pair (j, j + rotary_dim / 2), NeoX; or "interleaved": (2 j, 2 j + 1), GPT-J
    # "freqs": radians, float32; "cos_sin": cosines and sines; "inv_freq": radians per position, float32, no table
    angles: str = "freqs"
    angle_dtype: str = "float32"
    angle_entries: str = "pair"  # width rotary_dim / 2; or "feature": width rotary_dim, entries of a pair may differ
    inplace: bool = False
    direction: str = "forward"  # or "backward": the transpose of the forward map, applied to grad_output
    key_heads: int = 0  # heads of a second tensor with the same tokens, the key; it rotates in the same launch
    copied_heads: int = 0  # out of place: how many of the last ``heads`` are copied, as v is in a packed qkv
    # A token's position. "order": its index in the sequence; "shifted": plus an int; "offset": plus a number on the
    # device; "starts": plus one number per sequence on the device. "ids": one number per token on the device; "axes":
    # one number per token and axis, and each pair uses the numbers of one axis: see ``axis_of_pair``.
    positions: str = "order"
    context_parallel: bool = False  # x has two of the 2 * cp_size chunks of each sequence
    rotated: str = "first"  # which features: the "first" rotary_dim, the "last"; "proportional": see ``pair_distance``
    conjugate: bool = False  # rotate by the negative angle
    scaled: bool = False  # cosine and sine are multiplied by attention_scaling
    angles_per_batch: bool = False  # each batch entry has its own table
    norm: str = ""  # RMSNorm before the rotation, with a weight: of each "head", or of "all" heads of a tensor together
    zero_centered: bool = False  # features are multiplied by 1 + the norm's weight
    # Where a forward rounds, besides at the store. "product": the norm's result; "each": also before the norm's weight.
    rounding: str = "once"
    sections: tuple[int, ...] = ()  # positions "axes": how many pairs take their angle from each axis
    sections_interleaved: bool = False  # axes take turns over the pairs, as in Qwen3-VL; else their pairs are in a row
    # The input has pairs (2 j, 2 j + 1), the result has style half. The transpose writes pairs (2 j, 2 j + 1) again.
    deinterleaves: bool = False
    # MLA: features of each head's value; 0 in other calls. x is kv, [.., heads, head_dim - rotary_dim + value_dim]. All
    # heads share one key head of rotary_dim features: it is rotated, and appended to the key features that kv has of
    # each head. The transpose takes the gradients of the key and of the value.
    value_dim: int = 0
    # The rotated key and the unchanged value are written to pages of a cache, of the "same" dtype or "float8" (e4m3).
    # ``inplace`` then refers to the query.
    cache: str = ""
    cache_layout: str = "NHD"  # pages of [page_size, heads, head_dim]; or "HND": [heads, page_size, head_dim]
    key_inplace: bool = False  # beside a cache, the key is overwritten too
    angle_gradient: bool = False  # backward: give the gradient of the angles too, which reads the forward's input

    def __post_init__(self) -> None:
        if type(self.sections) is not tuple:  # JSON has lists
            object.__setattr__(self, "sections", tuple(self.sections))
        for name, allowed in (
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
            ("style", STYLES),
            ("angles", ANGLES),
            ("angle_dtype", tuple(ITEM_SIZE)),
            ("angle_entries", ANGLE_ENTRIES),
            ("direction", DIRECTIONS),
            ("positions", POSITIONS),
            ("rotated", ROTATED),
            ("norm", NORMS),
            ("rounding", ROUNDINGS),
            ("cache", CACHES),
            ("cache_layout", CACHE_LAYOUTS),
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
        if self.key_heads < 0 or not 0 <= self.copied_heads < self.heads:
            raise ValueError(f"key_heads={self.key_heads} and copied_heads={self.copied_heads} must be from 0 to heads")
        if self.copied_heads and (self.key_heads or self.inplace):
            raise ValueError(
                "copied_heads are those of one tensor, out of place: in place they are not heads of the call"
            )
        self._check_sections()
        self._check_latent()
        self._check_cache()
        if self.norm and self.copied_heads:
            raise ValueError("copied_heads cannot be beside a norm: a packed qkv is normalised in place")
        if not self.norm and (self.zero_centered or self.rounding != "once"):
            raise ValueError("zero_centered and rounding say how a norm is taken: without one leave them out")
        if self.rotated == "proportional" and (self.interleaved or self.head_dim % 2):
            raise ValueError(
                'rotated="proportional" pairs feature j with j + head_dim / 2: style half, an even head_dim'
            )

    def _check_cache(self) -> None:
        if not self.appends and (self.cache_layout != "NHD" or self.key_inplace):
            raise ValueError("cache_layout and key_inplace say how a cache is written: without one leave them out")
        if self.appends and not (self.inplace and self.key_heads and self.layout == "thd" and self.norm != "all"):
            raise ValueError(
                'a cache is written beside a query in place, from a key of the same packed tokens ("thd"), and a norm is of each head'
            )

    def _check_sections(self) -> None:
        axes, pairs = len(self.sections), self.rotary_dim // 2
        if (self.positions == "axes") != bool(axes) or (self.sections_interleaved and not axes):
            raise ValueError('sections are of positions "axes", and these have sections: give both or neither')
        if not axes:
            return
        if not 2 <= axes <= MOST_AXES or min(self.sections) < 0 or sum(self.sections) != pairs:  # noqa: PLR2004
            raise ValueError(
                f"sections must be 2 to {MOST_AXES} numbers of pairs that add up to rotary_dim / 2, {pairs}, got {self.sections}"
            )
        second, third = self.sections[1], self.sections[-1]
        if self.sections_interleaved and (axes != 3 or 3 * second > pairs + 1 or 3 * third > pairs):  # noqa: PLR2004
            raise ValueError(
                f"interleaved sections must be 3, of which the second and the third are a third of {pairs} pairs at most, "
                f"got {self.sections}"
            )

    def _check_latent(self) -> None:
        if self.angle_gradient and (self.direction == "forward" or self.norm or self.splits):
            raise ValueError("angle_gradient is of the backward of a rotation, without a norm and without value_dim")
        if self.deinterleaves and (
            self.interleaved or self.rotated == "proportional" or self.norm or self.copied_heads
        ):
            raise ValueError(
                "deinterleaves is for style half without a norm and without copied_heads, and rotated first or last"
            )
        if self.value_dim < 0:
            raise ValueError(f"value_dim must be at least 0, got {self.value_dim}")
        if self.splits and (self.key_heads or self.copied_heads or self.inplace or self.norm or self.rotated != "last"):
            raise ValueError(
                'value_dim is of a key and a value made of kv, out of place: rotated="last", without key_heads, copied_heads or norm'
            )
        if self.splits and self.rotary_dim == self.head_dim:
            raise ValueError(f"value_dim needs features of kv in the key, got rotary_dim = head_dim = {self.head_dim}")

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The axis of the positions that each pair takes its angle from.

        Interleaved: 0 1 2 0 1 2 ...; once axis 1 or 2 has all its pairs, axis 0 takes its turns.
        """
        if self.sections_interleaved:
            ends = [3 * n for n in self.sections]
            return tuple(j % 3 if j % 3 and j < ends[j % 3] else 0 for j in range(self.rotary_dim // 2))
        return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))

    @property
    def plain(self) -> bool:
        """One tensor, positions in order, a table, the first features rotate. Its kernel has no parameters for more."""
        return self.angles != "inv_freq" and not self.deinterleaves and not self.angle_gradient and (
            self.key_heads, self.copied_heads, self.positions, self.context_parallel, self.rotated, self.conjugate,
            self.scaled, self.angles_per_batch, self.norm,
        ) == PLAIN  # fmt: skip

    @property
    def appends(self) -> bool:
        """The rotated key and a value are written to a cache."""
        return self.cache != ""

    @property
    def all_heads(self) -> int:
        """Rows of one token: the heads of x, then of the key, then, with a cache, of the value."""
        return self.heads + (2 if self.appends else 1) * self.key_heads

    @property
    def token_rows(self) -> str:
        """``all_heads`` as an expression of the kernel's constants."""
        return "HEADS + 2 * KEY_HEADS" if self.appends else "HEADS + KEY_HEADS"

    @property
    def pair_distance(self) -> int:
        """Distance in features between the two of a pair in style half: half of rotary_dim, or of head_dim if proportional."""
        return (self.head_dim if self.rotated == "proportional" else self.rotary_dim) // 2

    @property
    def moved_pairs(self) -> int:
        """Pairs per head that a program reads and writes: those that rotate; all if proportional and ``moves_all``."""
        return self.head_dim // 2 if self.rotated == "proportional" and self.moves_all else self.rotary_dim // 2

    @property
    def moves_all(self) -> bool:
        """Features that do not rotate are written too: copied out of place or to a cache, or normalised."""
        return not self.inplace or self.normed or self.appends

    @property
    def leaves_outside(self) -> bool:
        """Tokens that no sequence holds are not written. Else they are copied, deinterleaved if it ``deinterleaves``."""
        return self.inplace and not self.deinterleaves

    @property
    def copies_tail(self) -> bool:
        """Beside the pairs, the features that do not rotate must be written."""
        return self.moves_all and self.rotary_dim < self.head_dim and self.rotated != "proportional"

    @property
    def normed(self) -> bool:
        """Heads are normalised before they rotate."""
        return self.norm != ""

    @property
    def absent(self) -> float | None:
        """The value of a tile where it has no rows or features: 0.0 for a norm, which sums over them; else any value."""
        return 0.0 if self.normed else None

    @property
    def norms_before_cache(self) -> bool:
        """A norm with a cache: the key is normalised before it is written, the value is not."""
        return self.normed and self.appends

    @property
    def takes_chunks(self) -> bool:
        """A kernel with a norm may take the heads of a token in chunks. A norm with a cache is one of each head."""
        return self.normed and not self.appends

    @property
    def tail_dtype(self) -> str:
        """The dtype, in the kernel's source, of normalised features that do not rotate: float32 if a cache rounds them."""
        return "tl.float32" if self.appends else "first.dtype"

    @property
    def gradient_of_norm(self) -> bool:
        """The gradient of a norm with a rotation: it reads the forward's input, and gives the weights' gradients too."""
        return self.normed and self.direction == "backward"

    @property
    def reads_given(self) -> bool:
        """The gradient of a norm, or one of the angles: both read the forward's input."""
        return self.gradient_of_norm or self.angle_gradient

    @property
    def splits(self) -> bool:
        """MLA's kv becomes a key and a value."""
        return self.value_dim > 0

    @property
    def sums_heads(self) -> bool:
        """The transpose of ``splits``: the gradient of the key head that all heads share is a sum over the heads."""
        return self.splits and self.direction == "backward"

    @property
    def takes_all_heads(self) -> bool:
        """A program has all heads of its tokens and sums over them: for gradients of MLA's shared key head or of angles."""
        return self.sums_heads or self.angle_gradient

    @property
    def kept_dim(self) -> int:
        """Features of a head that do not rotate; in MLA these are the key's features in kv."""
        return self.head_dim - self.rotary_dim

    @property
    def split_dims(self) -> tuple[int, int]:
        """Features of a head of x, and of a head of the first result: (kv, key); backward (key, kv)."""
        dims = self.kept_dim + self.value_dim, self.head_dim
        return dims if self.direction == "forward" else (dims[1], dims[0])

    def split_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of both results of MLA, given the shape of x."""
        if self.sums_heads:
            return (*shape[:-1], self.split_dims[1]), (*shape[:-2], 1, self.rotary_dim)
        return (*shape[:-1], self.head_dim), (*shape[:-1], self.value_dim)

    @property
    def norm_rows(self) -> int:
        """Rows of a token that a tile must hold: all, up to a power of two, if they are normalised together; else 1."""
        return 1 << (self.all_heads - 1).bit_length() if self.norm == "all" else 1

    @property
    def packed(self) -> bool:
        """The tokens of all sequences are on one axis, and positions come from cu_seqlens."""
        return self.layout == "thd" and self.positions not in ("ids", "axes")

    @property
    def takes_bounds(self) -> bool:
        """The kernel has a parameter for cu_seqlens, as kernels of packed calls and of complete calls do."""
        return self.packed or not self.plain

    @property
    def copies_key(self) -> bool:
        """The kernel has parameters for a second result: complete calls, out of place."""
        return not self.plain and not self.inplace

    @property
    def takes_negative_positions(self) -> bool:
        """A position may be negative, before the first row of a table: the caller's offset, starts or ids."""
        return not self.plain and not self.takes_rates

    @property
    def merges_batch(self) -> bool:
        """In sbhd the b * h rows of one position are adjacent and share its angles, so they are one axis of rows."""
        return self.layout == "sbhd" and self.plain

    @property
    def interleaved(self) -> bool:
        """The two features of a pair are neighbours."""
        return self.style == "interleaved"

    @property
    def computes_sincos(self) -> bool:
        """The kernel computes sine and cosine, since no sines are given."""
        return self.angles != "cos_sin"

    @property
    def takes_rates(self) -> bool:
        """The kernel computes the angles, from positions and radians per position."""
        return self.angles == "inv_freq"

    @property
    def angle_arguments(self) -> str:
        """The kernel's angle parameters, as the arguments of a call."""
        return "cos, sin" if self.angles == "cos_sin" else self.angles

    @property
    def summary(self) -> str:
        """One sentence for the header of the generated module."""
        angle = {
            "freqs": "sine and cosine taken here",
            "cos_sin": "cosine and sine given",
            "inv_freq": "angles, sines and cosines taken here",
        }[self.angles]
        place = "in place" if self.inplace else "out of place"
        if self.normed:
            angle = f"{angle}; RMSNorm before it"
        if self.splits:
            return f"MLA's key and value of kv, any layout, {self.style} pairs; {angle}."
        if self.angle_gradient:
            return f"The gradient of RoPE and of its angles, any layout, {self.style} pairs; {angle}."
        if self.deinterleaves:
            angle = f"{angle}; of interleaved pairs"
        if self.appends:
            angle = f"{angle}; key and value to a cache"
        calls = f"plain calls, {self.layout}" if self.plain else "complete calls, any layout"
        return f"RoPE of {calls}, {self.style} pairs, {place}; {angle}."


@dataclasses.dataclass(frozen=True)
class RopeSize:
    """The sizes of a call, which a kernel takes at run time without being compiled again."""

    batch: int  # sequences; in thd, packed sequences
    seq: int  # tokens per sequence; in thd the mean

    @property
    def tokens(self) -> int:
        """All tokens of the call."""
        return self.batch * self.seq
