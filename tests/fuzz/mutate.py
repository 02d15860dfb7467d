"""Changes that somebody hostile, or a broken drive, would make: of bytes, and of parsed JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

RAW = "@raw@"
"""A string of this and a number stands for a text that `json.dumps` does not write."""

RAWS = (
    "NaN",
    "-Infinity",
    "1e999",
    "1e308",
    "-1e-400",
    "9" * 5000,
    "1" + "0" * 400,
    "1" + "0" * 18,
    "[" * 600 + "]" * 600,
    "[" * 30_000,
    '{"a":' * 500 + "0" + "}" * 500,
    '{"a":1,"a":2}',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"\U0001f600"',
    '"\\u0000"',
    '"\x7f\\n"',
    "[],",
    "",
    "01",
    "'x'",
    '{"!int":"0x' + "f" * 9000 + '"}',
    '{"!set":[1,1.0,true]}',
    '{"!numpy":["<f8",[1000000000000],""]}',
    '{"!numpy":["<U0",[100000000],""]}',
    '{"!torch.Tensor":["uint7",[8],"AAAAAAAAAAA="]}',
    '{"!torch.Size":[{"!int":"0x' + "f" * 5000 + '"}]}',
    '{"!range":[0,1000000000000,1]}',
    '{"!deque":[5,[1,2]]}',
    '{"!decimal":"1e999999"}',
)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 4095, 4096, 65_536),
    *((1 << 31) - 1, 1 << 31, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 64, 10**30, -(10**30)),
    *(0.0, -0.0, 1.5, -2.5, 1e300),
    *("", "x", "\n", "../../x", "a/b", "\x1b[31m", "a" * 300, "é", "keepstep.x", "__metadata__"),
    *("0001.00000000", "0001.00000000-000000001", "0" * 32, "F32", "U8", "params", "pt", "!set"),
    *([], {}, [[]], [0], [0, 0], ["x"], {"": 0}, {"a": []}, [{}], [[["params"], 1]]),
)


def of_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to three changes, without care for any seal."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + rng.choice((1, 8, 4096))]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 40)))
        elif kind == 5:
            begin = rng.randrange(len(other) + 1)
            changed[at : at + 512] = other[begin : begin + 512]
        else:
            changed[at:at] = bytes(changed[: rng.choice((1, 16, 4096))])
    return bytes(changed)


def of_tree(tree: Any, rng: random.Random, *, grow: bool = False) -> Any:
    """One to three changes of parsed JSON; `grow`: one of them makes something very large."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, rng)
    return _grown(tree, rng) if grow else tree


def text(tree: Any, rng: random.Random) -> bytes:
    """JSON of the tree, in one of several spellings."""
    separators = rng.choice(((",", ":"), (",", ":"), (", ", ": ")))
    written = json.dumps(tree, separators=separators, ensure_ascii=rng.random() < 0.7)
    for number, raw in enumerate(RAWS) if RAW in written else ():
        written = written.replace(f'"{RAW}{number}"', raw)
    return written.encode("utf-8", "surrogatepass")


def _changed(tree: Any, rng: random.Random) -> Any:
    holder, key = _place(tree, rng)
    if holder is None:
        return _value(tree, tree, rng)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = copy.deepcopy(_part(tree, rng))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(_value("", tree, rng))[:400]] = holder.pop(key)
    elif kind == 3 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), _value(holder[key], tree, rng))
    else:
        holder[key] = _value(holder[key], tree, rng)
    return tree


def _value(now: Any, tree: Any, rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return f"{RAW}{rng.randrange(len(RAWS))}"
    if kind < 4 and type(now) is int:
        return (
            now + rng.choice((-4096, -8, -1, 1, 8, 4096)) if kind < 3 else now << rng.randrange(40)
        )
    if kind < 4 and isinstance(now, str) and now:
        at = rng.randrange(len(now))
        return now[:at] + rng.choice(("", "0", "\n", "/", "é", "\x00", "ff")) + now[at + 1 :]
    if kind == 4:
        return [copy.deepcopy(now)] * rng.choice((1, 2, 70))
    return copy.deepcopy(rng.choice(VALUES))


def _place(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    """Where something is: what holds it, and its key or index there; (None, None) for the root."""
    holder, key, at = None, None, tree
    while isinstance(at, dict | list) and at and (holder is None or rng.random() < 0.8):
        holder = at
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        at = at[key]
    return holder, key


def _part(tree: Any, rng: random.Random) -> Any:
    holder, key = _place(tree, rng)
    return tree if holder is None else holder[key]


def _grown(tree: Any, rng: random.Random) -> Any:
    """A megabyte or two of the same, or of names, somewhere."""
    unit = rng.choice(([], [1], [[1]], {}, {"a": 0}, 300, -6, "ab", "中", None, 1.5))
    count = rng.choice((1_000, 60_000, 400_000))
    many: Any = [unit] * count
    if rng.random() < 0.3:
        many = {str(number): unit for number in range(count // 4)}
    holder, key = _place(tree, rng)
    if holder is None:
        return many
    holder[key] = many
    return tree
