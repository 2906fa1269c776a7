"""Calls of the GRU over sequences, its step, the linear over segments, and the modules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz.case import Call, Name
from tests.fuzz.views import View, contiguous, drawn

if TYPE_CHECKING:
    import random

    from tests.fuzz.draw import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODDS = (45, 25, 20, 10)
RESET = 0.15  # share of calls whose states are reset
LONG = 100  # so many steps take the reference too long one by one
FED = 0.25  # share of steps in place one of whose segments is the state that is overwritten
REFUSED = (TypeError, ValueError)
MODES = ("plain", "no_grad", "inference", "grad", "autocast", "stream", "graph")


def _size(rng: random.Random, world: World) -> int:
    return min(rng.choice((1, 2, 3, 5, 8, 12, 16, 20, 24, 32, 48, 64, 96, 100, 128, 256, 384, 600)), world.hidden)


@dataclasses.dataclass
class Tensors:
    """The tensors of a call, as they are drawn."""

    rng: random.Random
    world: World
    dtype: torch.dtype
    mode: str
    views: dict[str, View]
    plain: float

    def __call__(self, name: str, shape: tuple[int, ...], scale: float = 1.0, **rest: Any) -> Name:
        dtype = rest.pop("dtype", self.dtype)
        if self.mode == "autocast" and self.rng.random() < 0.3:
            dtype = self.rng.choice((torch.float32, torch.float16, torch.bfloat16))
        grad = rest.pop("grad", None)
        if grad is None:
            grad = self.rng.choice(("leaf", "leaf", "made", "")) if self.mode == "grad" else ""
        negative = (
            self.rng.random() < 0.03
            and dtype in (torch.float32, torch.float64)
            and grad != "leaf"
            and bool(math.prod(shape))
        )
        self.views[name] = drawn(
            self.rng, shape, dtype, scale=scale, plain=self.plain, grad=grad, negative=negative, **rest
        )
        return Name(name)


def _tensors(rng: random.Random, world: World, dtype: torch.dtype, mode: str) -> Tensors:
    return Tensors(rng, world, dtype, mode, {}, rng.choice((1.0, 0.8, 0.5, 0.2)))


def _about(rng: random.Random, world: World, mode: str, dtype: torch.dtype, spec: Any = None) -> dict[str, Any]:
    tf32 = rng.choice(((False, True), (False, True), (True, True), (False, False), (True, False)))
    if spec is not None and spec.precision:
        tf32 = (spec.precision == "tf32",) * 2
    return {"mode": mode, "autocast": rng.choice(world.casts) if mode == "autocast" else None, "tf32": tf32} | (
        {"truncates": True} if world.truncates and dtype != torch.float64 else {}
    )


def _marks(rng: random.Random, world: World, tensor: Tensors, shape: tuple[int, ...]) -> Name:
    odds = rng.choice((0.0, 0.02, 0.3, 1.0))
    marks = tuple(rng.random() < odds for _ in range(math.prod(shape)))
    tensor.views["resets"] = world.integers(rng, shape, torch.bool, marks)
    return Name("resets")


def gru(rng: random.Random, world: World, spec: Any = None, size: Any = None) -> Call:
    """A call of tuned.dispatch.gru."""
    dtype = getattr(torch, spec.dtype) if spec else rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, MODES)
    tensor = _tensors(rng, world, dtype, mode)
    both = rng.random() < 0.35 if spec is None else spec.directions == 2
    layers = rng.choices((1, 2, 3), (60, 25, 15))[0] if spec is None else spec.layers
    bias = rng.random() < 0.7 if spec is None else spec.bias
    layout = rng.choices(("dense", "packed", "thd"), (65, 20, 15))[0] if spec is None else spec.layout
    hidden, features = (_size(rng, world), _size(rng, world)) if spec is None else (spec.hidden, 32)
    batch = rng.choices((1, 2, 3, 5, 9, 17, 0), (38, 20, 14, 10, 8, 8, 2))[0] if size is None else size.batch
    seq = rng.choices((1, 2, 3, 5, 9, 20, 70), (20, 20, 20, 15, 12, 10, world.long))[0]
    seq = min(seq, 9) if size is not None else seq
    if spec is None and world.device == "cuda" and layout == "dense" and rng.random() < 0.05:
        # More than tuned.calls.gru.project.SMALL_PRODUCT, so that the product is not left to the library.
        batch, seq, hidden, features, layers = rng.choice((1, 1, 2)), rng.choice((500, 1001, 1996)), 384, 384, 1
    first = layout == "dense" and rng.random() < 0.5
    arguments: dict[str, Any] = {}
    named: dict[str, Any] = {}
    if layout == "dense":
        arguments["input"] = tensor("input", (batch, seq, features) if first else (seq, batch, features))
        if first:
            named["batch_first"] = True
    else:
        batch = max(batch, 1)
        lengths = [rng.randint(1 if layout == "packed" else 0, seq) for _ in range(batch)]
        lengths = sorted(lengths, reverse=True) if layout == "packed" else lengths
        arguments["input"] = tensor("input", (sum(lengths), features))
        if layout == "packed":
            sizes = [sum(n > step for n in lengths) for step in range(lengths[0])]
            tensor.views["batch_sizes"] = contiguous((len(sizes),), torch.int64, values=tuple(sizes), device="cpu")
            named["batch_sizes"] = Name("batch_sizes")
        else:
            bounds = tuple(itertools.accumulate(lengths, initial=0))
            tensor.views["cu_seqlens"] = world.integers(rng, (len(bounds),), torch.int32, bounds)
            named |= {"cu_seqlens": Name("cu_seqlens"), "max_seqlen": max(lengths) + rng.choice((0, 0, 1))}
    cells = layers * (2 if both else 1)
    arguments["hx"] = tensor("hx", (cells, batch, hidden))
    weights, scale = [], hidden**-0.5 * 0.6
    for layer, direction in itertools.product(range(layers), range(2 if both else 1)):
        wide = features if layer == 0 else hidden * (2 if both else 1)
        for kind, shape in (
            ("weight_ih", (3 * hidden, wide)),
            ("weight_hh", (3 * hidden, hidden)),
            ("b_ih", (3 * hidden,)),
            ("b_hh", (3 * hidden,)),
        ):
            if bias or kind.startswith("w"):
                weights.append(tensor(f"{kind}_{layer}_{direction}", shape, scale))
    arguments["weights"] = weights if rng.random() < 0.5 else tuple(weights)
    arguments |= {"bias": bias} if not bias else {}
    arguments |= {"num_layers": layers} if layers > 1 else {}
    arguments |= {"bidirectional": True} if both else {}
    if rng.random() < 0.15:
        arguments |= {"dropout": rng.choice((0.0, 0.5)), "training": False}
    arguments |= named
    if seq < LONG and (rng.random() < RESET if spec is None else spec.resets):
        arguments["resets"] = _marks(rng, world, tensor, tensor.views["input"].shape[:-1])
    return Call(
        "tuned.dispatch.gru",
        tensor.views,
        arguments,
        "check_pytorch",
        ("gru",),
        **_about(rng, world, mode, dtype, spec),
    )


def gru_cell(rng: random.Random, world: World, spec: Any = None, size: Any = None) -> Call:
    """A call of tuned.dispatch.gru_cell."""
    dtype = getattr(torch, spec.dtype) if spec else rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, MODES)
    tensor = _tensors(rng, world, dtype, mode)
    inplace = rng.random() < 0.3 if spec is None else spec.inplace
    bias = rng.random() < 0.7 if spec is None else spec.bias
    hidden = _size(rng, world) if spec is None else spec.hidden
    widths = _widths(rng, world) if spec is None else list(spec.inputs)
    batch = rng.choices((1, 2, 3, 5, 9, 17, 40, 0), (30, 20, 12, 10, 8, 8, 5, 3))[0] if size is None else size.batch
    grad = "" if inplace else None
    state = tensor("h", (batch, hidden), shared=not inplace, grad=grad)
    fed = None  # the segment that is the state itself
    if inplace and spec is None and mode != "autocast" and rng.random() < FED:
        fed = rng.randrange(len(widths))
        widths[fed] = hidden
    x = [
        state
        if i == fed
        else tensor(f"x{i}", (batch, n), **({"dtype": dtype} if mode != "autocast" else {}), grad=grad)
        for i, n in enumerate(widths)
    ]
    scale = hidden**-0.5 * 0.6
    arguments: dict[str, Any] = {
        "x": x[0] if len(x) == 1 and rng.random() < 0.8 else tuple(x),
        "h": state,
        "weight_ih": tensor("weight_ih", (3 * hidden, sum(widths)), scale, grad=grad),
        "weight_hh": tensor("weight_hh", (3 * hidden, hidden), scale, grad=grad),
    }
    if bias:
        arguments |= {name: tensor(name, (3 * hidden,), scale, grad=grad) for name in ("bias_ih", "bias_hh")}
    if inplace:
        arguments["inplace"] = True
    if rng.random() < RESET / 2:
        arguments["resets"] = _marks(rng, world, tensor, (batch,))
    about = _about(rng, world, mode if not (inplace and mode == "grad") else "no_grad", dtype, spec)
    if mode == "autocast" and len({v.dtype for n, v in tensor.views.items() if n[0] == "x"}) > 1:
        for n in [n for n in tensor.views if n[0] == "x"]:
            tensor.views[n] = dataclasses.replace(tensor.views[n], dtype=dtype)
    return Call(
        "tuned.dispatch.gru_cell", tensor.views, arguments, "check_pytorch", ("gru_cell",),
        written=("h",) if inplace else (), **about,
    )  # fmt: skip


def _widths(rng: random.Random, world: World) -> list[int]:
    many = rng.choices((1, 2, 3, 4, 5), (40, 30, 12, 10, 8))[0]
    widths = [_size(rng, world) for _ in range(many)]
    if many > 1 and rng.random() < 0.1:
        widths[rng.randrange(many)] = 0
    return widths


def linear_cat(rng: random.Random, world: World, spec: Any = None, size: Any = None) -> Call:
    """A call of tuned.dispatch.linear_cat."""
    dtype = getattr(torch, spec.dtype) if spec else rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, MODES)
    tensor = _tensors(rng, world, dtype, mode)
    widths = _widths(rng, world) if spec is None else list(spec.inputs)
    if spec is not None and len(widths) == 1:  # a GRU's projection; elsewhere the library serves one segment
        widths = [widths[0] - widths[0] // 2, widths[0] // 2]
    outputs = _size(rng, world) if spec is None else spec.outputs
    lead = rng.choice(((), (1,), (2,), (5,), (17,), (3, 2), (1, 1), (2, 1, 3), (0,), (40,)))
    if size is not None:
        lead = (size.batch,)
    inputs = [tensor(f"x{i}", (*lead, n)) for i, n in enumerate(widths)]
    arguments: dict[str, Any] = {
        "inputs": tuple(inputs),
        "weight": tensor("weight", (outputs, sum(widths)), sum(widths) ** -0.5 if sum(widths) else 1.0),
    }
    if rng.random() < 0.6 if spec is None else spec.bias:
        arguments["bias"] = tensor("bias", (outputs,))
    return Call(
        "tuned.dispatch.linear_cat",
        tensor.views,
        arguments,
        "check_pytorch",
        ("linear_cat",),
        **_about(rng, world, mode, dtype, spec),
    )


# Modules ------------------------------------------------------------------------------------------------------------------


def nn_gru(  # noqa: PLR0912, PLR0915 - one thing after another
    rng: random.Random, world: World, *, wrong: bool = False
) -> Call:
    """The call of a GRU module, ours or torch's patched or replaced; right is what torch's module would answer."""
    dtype = rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, MODES[:-1])  # capturing a module would be capturing its call
    tensor = _tensors(rng, world, dtype, mode)
    both, layers, bias, first = rng.random() < 0.35, rng.choice((1, 1, 2)), rng.random() < 0.7, rng.random() < 0.5
    hidden, features = _size(rng, world), _size(rng, world)
    batch, seq = rng.choice((1, 1, 2, 3, 9)), rng.choice((1, 2, 3, 9))
    packed = rng.random() < 0.2
    unbatched = not packed and rng.random() < 0.15
    cells = layers * (2 if both else 1)
    named: dict[str, Any] = {}
    wide: tuple[int, ...] = (batch, seq, features) if first else (seq, batch, features)
    if packed:
        lengths = sorted((rng.randint(1, seq) for _ in range(batch)), reverse=True)
        wide = (sum(lengths), features)
        sizes = [sum(n > step for n in lengths) for step in range(lengths[0])]
        tensor.views["batch_sizes"] = contiguous((len(sizes),), torch.int64, values=tuple(sizes), device="cpu")
        named["batch_sizes"] = Name("batch_sizes")
        if rng.random() < 0.5:
            order = tuple(rng.sample(range(batch), batch))
            tensor.views["order"] = contiguous((batch,), torch.int64, values=order)
            named["order"] = Name("order")
    elif unbatched:
        wide = (seq, features)
    state: tuple[int, ...] = (cells, hidden) if unbatched else (cells, batch, hidden)
    has_state = rng.random() < 0.6
    given = dtype
    if wrong:
        way = rng.choice(
            (
                "features",
                "axes",
                "state",
                "state axes",
                "dtype",
                "no step",
                "state layers",
                "state dtype",
                "None",
                "elsewhere",
            )
        )
        has_state = has_state or way.startswith("state")
        if way == "features":
            wide = (*wide[:-1], wide[-1] + 1)
        elif way == "axes":
            wide = (features,) if packed or rng.random() < 0.5 else (1, *wide, 1)[: 4 + 1]
        elif way == "state":
            state = (*state[:-1], hidden + 1)
        elif way == "state axes":
            state = state[1:] if rng.random() < 0.5 else (1, *state)
        elif way == "state layers":
            state = (cells + 1, *state[1:])
        elif way == "dtype":
            given = torch.float64 if dtype != torch.float64 else torch.float32
        elif way == "no step" and not packed:
            wide = (0, *wide[1:]) if unbatched or not first else (wide[0], 0, wide[2])
        tensor.mode = mode = "no_grad"
    arguments: dict[str, Any] = {
        "kind": rng.choice(("nn", "nn", "patched", "replace")),
        "constructor": {"input_size": features, "hidden_size": hidden}
        | ({"num_layers": layers} if layers > 1 else {})
        | ({"bias": False} if not bias else {})
        | ({"batch_first": True} if first else {})
        | ({"bidirectional": True} if both else {}),
    }
    chunk = rng.random() < 0.6
    arguments["weights"] = _parameters(tensor, hidden, features, layers, both=both, bias=bias)
    arguments["input"] = tensor("input", wide, dtype=given)
    if has_state:
        arguments["hx"] = tensor(
            "hx", state, dtype=torch.float64 if wrong and way == "state dtype" and dtype != torch.float64 else dtype
        )
    if wrong and way == "None":
        arguments["input"] = None
    if wrong and way == "elsewhere":
        name = rng.choice([n for n in ("input", "hx") if n in arguments])
        view = tensor.views[name]
        tensor.views[name] = contiguous(view.shape, view.dtype, device="cpu" if world.device == "cuda" else "meta")
    arguments |= named
    arguments |= {"chunk": chunk} if not chunk else {}
    for name, view in tensor.views.items():  # a module's parameters are its own leaves
        if name not in ("input", "hx") and view.grad:
            tensor.views[name] = dataclasses.replace(view, grad="")
    if mode == "grad" and not any(v.grad for v in tensor.views.values()):
        mode = "plain"
    named = {"text": True} if world.texts else {}
    return Call(
        "tests.fuzz.originals.nn_gru", tensor.views, arguments, "check_pytorch", ("original_nn_gru",), {"must": True, **named},
        **_about(rng, world, mode, dtype),
    )  # fmt: skip


def _parameters(
    tensor: Tensors, hidden: int, features: int, layers: int, *, both: bool, bias: bool
) -> tuple[Name, ...]:
    made, scale = [], hidden**-0.5 * 0.6
    dtype = tensor.dtype
    for layer, direction in itertools.product(range(layers), range(2 if both else 1)):
        wide = features if layer == 0 else hidden * (2 if both else 1)
        for kind, shape in (
            ("weight_ih", (3 * hidden, wide)),
            ("weight_hh", (3 * hidden, hidden)),
            ("b_ih", (3 * hidden,)),
            ("b_hh", (3 * hidden,)),
        ):
            if bias or kind.startswith("w"):
                name = f"{kind}_{layer}_{direction}"
                tensor.views[name] = drawn(tensor.rng, shape, dtype, scale=scale, plain=tensor.plain)
                made.append(Name(name))
    return tuple(made)


def nn_gru_cell(rng: random.Random, world: World, *, wrong: bool = False) -> Call:
    """The call of a GRUCell module."""
    dtype = rng.choices(DTYPES, ODDS)[0]
    mode = world.mode(rng, MODES[:-1])  # capturing a module would be capturing its call
    tensor = _tensors(rng, world, dtype, mode)
    hidden, bias, batch = _size(rng, world), rng.random() < 0.7, rng.choice((1, 1, 2, 5, 17))
    kind = rng.choice(("nn", "nn", "patched", "replace"))
    widths = _widths(rng, world) if kind == "nn" and rng.random() < 0.4 and not wrong else [_size(rng, world)]
    features = sum(widths)
    unbatched = rng.random() < 0.2
    lead = () if unbatched else (batch,)
    state: tuple[int, ...] = (*lead, hidden)
    has_state, way = rng.random() < 0.7, ""
    if wrong:
        way = rng.choice(("features", "axes", "state", "state axes", "dtype", "batch", "None", "elsewhere"))
        has_state = has_state or way in ("state", "state axes", "batch")
        # torch.nn.GRUCell, asked for its error, ends the process for a vector with states [1, 1]: see test_nn_errors.py.
        more = 2 if state == (1,) else 1
        state = {"state": (*lead, hidden + 1), "state axes": (more, *state), "batch": (7, hidden)}.get(way, state)
        widths = [features + 1] if way == "features" else widths
        lead = (2, 2) if way == "axes" else lead
        tensor.mode = mode = "no_grad"
    x = [
        tensor(f"x{i}", (*lead, n), dtype=torch.float64 if way == "dtype" and dtype != torch.float64 else dtype)
        for i, n in enumerate(widths)
    ]
    if mode == "autocast":
        for n in x:
            tensor.views[n] = dataclasses.replace(tensor.views[n], dtype=dtype)
    shapes = {"weight_ih": (3 * hidden, features), "weight_hh": (3 * hidden, hidden)}
    shapes |= {"b_ih": (3 * hidden,), "b_hh": (3 * hidden,)} if bias else {}
    for name, shape in shapes.items():
        tensor.views[name] = drawn(rng, shape, dtype, scale=hidden**-0.5 * 0.6, plain=tensor.plain)
    arguments: dict[str, Any] = {
        "kind": kind,
        "constructor": {"input_size": features, "hidden_size": hidden} | ({"bias": False} if not bias else {}),
        "weights": tuple(map(Name, shapes)),
        "input": x[0] if len(x) == 1 else tuple(x),
    }
    if has_state:
        arguments["hx"] = tensor("hx", state)
    if way == "None":
        arguments["input"] = None
    if way == "elsewhere":
        view = tensor.views["x0"]
        tensor.views["x0"] = contiguous(view.shape, view.dtype, device="cpu" if world.device == "cuda" else "meta")
    if mode == "grad" and not any(v.grad for v in tensor.views.values()):
        mode = "plain"
    named = {"text": True} if world.texts else {}
    return Call(
        "tests.fuzz.originals.nn_gru_cell", tensor.views, arguments, "check_pytorch", ("original_nn_gru_cell",),
        {"must": True, **named}, **_about(rng, world, mode, dtype),
    )  # fmt: skip


# Wrong calls --------------------------------------------------------------------------------------------------------------


def spoiled(rng: random.Random, world: World, call: Call) -> Call:  # noqa: PLR0915 - one way after another
    """A call of tuned.dispatch's gru, gru_cell or linear_cat with one thing that is not allowed."""
    views, arguments = dict(call.views), dict(call.arguments)
    away = "cpu" if world.device == "cuda" else "meta"
    floats = [n for n, v in views.items() if v.dtype.is_floating_point]
    name = rng.choice(floats)
    dtype = views[floats[0]].dtype

    def swap(n: str, **changes: Any) -> None:
        old = views[n]
        views[n] = contiguous(
            changes.get("shape", old.shape), changes.get("dtype", old.dtype), device=changes.get("device", "")
        )

    def drop(n: str, value: Any = None) -> None:
        for key, v in arguments.items():
            if v == n:
                arguments[key] = value
            elif isinstance(v, (tuple, list)):
                arguments[key] = type(v)(value if one == n else one for one in v)

    shape = views[name].shape
    ways: dict[str, Any] = {
        "a dimension more": lambda: swap(name, shape=(*shape[:-1], shape[-1] + 1)),
        "an axis more": lambda: swap(name, shape=(1, 1, *shape, shape[-1] + 1)),  # of another width: some take any axes
        "another dtype": lambda: swap(name, dtype=torch.float64 if dtype != torch.float64 else torch.float32),
        "integers": lambda: [swap(n, dtype=torch.int64) for n in floats],
        "elsewhere": lambda: swap(name, device=away),
        "a number": lambda: drop(name, 3.0),
    }
    if len(floats) == 1:
        del ways["another dtype"], ways["elsewhere"]
    if call.function.endswith("gru_cell"):
        ways["no tensor"] = lambda: drop("h")
        if "bias_ih" in arguments:
            ways["one bias"] = lambda: arguments.pop(rng.choice(("bias_ih", "bias_hh")))
        ways["no segment"] = lambda: arguments.update(x=())
    elif call.function.endswith("linear_cat"):
        ways["no segment"] = lambda: arguments.update(inputs=())
        ways["no tuple"] = lambda: arguments.update(inputs=Name("x0"))
        ways["no weight"] = lambda: drop("weight")
        widths = [v.shape[-1] for n, v in views.items() if n[0] == "x"]
        if len(widths) > 1 and name in floats and name[0] == "x":
            del ways["a dimension more"]
            ways["other rows"] = lambda: swap(name, shape=(7, *shape[1:]) if len(shape) > 1 else (7, *shape))
    else:
        ways["no state"] = lambda: drop("hx")
        ways["a weight less"] = lambda: arguments.update(weights=arguments["weights"][:-1])
        ways["more layers"] = lambda: arguments.update(num_layers=arguments.get("num_layers", 1) + 1)
        ways["no layers"] = lambda: arguments.update(num_layers=0)
        ways["dropout"] = lambda: arguments.update(dropout=1.5, training=True)
        if "batch_sizes" in arguments:
            ways["rising sizes"] = lambda: views.update(
                batch_sizes=contiguous((2,), torch.int64, values=(1, 2), device="cpu")
            )
            ways["int32 sizes"] = lambda: swap("batch_sizes", dtype=torch.int32, device="cpu")
            ways["batch first"] = lambda: arguments.update(batch_first=True)
        elif "cu_seqlens" in arguments:
            ways["long bounds"] = lambda: swap("cu_seqlens", dtype=torch.int64)
            ways["no max_seqlen"] = lambda: arguments.pop("max_seqlen")
            ways["both"] = lambda: (
                views.update(batch_sizes=contiguous((1,), torch.int64, values=(1,), device="cpu")),
                arguments.update(batch_sizes=Name("batch_sizes")),
            )
        else:
            ways["max_seqlen alone"] = lambda: arguments.update(max_seqlen=3)
            if name == "input":
                ways["no step"] = lambda: swap(
                    "input", shape=(shape[0], 0, shape[2]) if arguments.get("batch_first") else (0, *shape[1:])
                )
    if "resets" in arguments:
        ways["marks of float"] = lambda: swap("resets", dtype=torch.float32)
        ways["marks too many"] = lambda: swap(
            "resets", shape=(*views["resets"].shape[:-1], views["resets"].shape[-1] + 1)
        )
    what = rng.choice(sorted(ways))
    ways[what]()
    views = {n: dataclasses.replace(v, grad="") for n, v in views.items()}
    mode = call.mode if call.mode in ("plain", "no_grad", "inference") else "plain"
    return Call(call.function, views, arguments, "check_refused", REFUSED, {"text": what}, mode=mode, tf32=call.tf32)
