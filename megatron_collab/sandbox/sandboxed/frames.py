"""NumPy arrays and pandas series, frames and indices as data: the part of `values` for these two packages.

`encoder` and `decoder` are the `Encoder` and `Decoder` of `values`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

_DTYPE = r"[<>|=]?[?biufcSUmM]\d*(\[\d*[a-zA-Zμ]+\])?|\|O"
_EXTENSION = r"str|string|boolean|U?Int\d+|Float\d+|datetime64\[\w+, [\w/+:-]+\]"


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.fullmatch(pattern, text) is not None


def encode(encoder: Any, value: Any, depth: int) -> list[Any] | None:
    """The encoded value; None if it is no array, scalar, series, frame or index."""
    kind = type(value)
    package = (value if isinstance(value, type) else kind).__module__.partition(".")[0]
    if package not in ("numpy", "pandas"):
        return None
    import numpy

    if kind is numpy.ndarray and value.dtype.names is None:
        return ["numpy array", value.dtype.str, list(value.shape), encoder.number(value).contents(value, depth)]
    if isinstance(value, numpy.generic) and value.dtype.names is None:
        return ["numpy scalar", value.dtype.str, contents(encoder, value.reshape(()), depth)]
    if isinstance(value, numpy.dtype) and _matches(_DTYPE, value.str):
        return ["numpy dtype", value.str]
    if isinstance(value, type) and issubclass(value, numpy.generic) and value.__module__ == "numpy":
        return ["numpy type", value.__name__]
    return _pandas(encoder, value, depth) if package == "pandas" else None


def contents(encoder: Any, array: Any, depth: int) -> Any:
    if array.dtype.kind == "O":
        return [encoder.encode(item, depth + 1) for item in array.ravel().tolist()]
    return base64.b64encode(array.tobytes()).decode()


def filled(decoder: Any, dtype: Any, shape: tuple[int, ...], encoded: Any, depth: int) -> Any:
    """A new array with what `contents` encoded."""
    import numpy

    if dtype.kind == "b":  # only the bytes 0 and 1 are valid booleans
        return (numpy.frombuffer(base64.b64decode(encoded, validate=True), numpy.uint8) != 0).reshape(shape)
    if dtype.kind != "O":
        return numpy.frombuffer(bytearray(base64.b64decode(encoded, validate=True)), dtype).reshape(shape)
    array: Any = numpy.empty(math.prod(shape), dtype=object)
    for at, item in enumerate(encoded):
        array[at] = decoder.decode(item, depth)
    if len(encoded) != len(array):
        raise ValueError("the number of elements does not match the shape")
    return array.reshape(shape)


def _pandas(encoder: Any, value: Any, depth: int) -> list[Any] | None:
    import pandas

    kind = type(value)
    if value is pandas.NaT or value is pandas.NA:
        return ["pandas missing", "NaT" if value is pandas.NaT else "NA"]
    if kind is pandas.Timestamp or kind is pandas.Timedelta:
        return [f"pandas {kind.__name__.lower()}", value.isoformat()]
    if kind is pandas.RangeIndex:
        fields = (value.start, value.stop, value.step, value.name)
        return ["pandas range", *(encoder.encode(field, depth) for field in fields)]
    if kind is pandas.MultiIndex:
        return ["pandas multi", encoder.encode(value.tolist(), depth), encoder.encode(list(value.names), depth)]
    if kind in (pandas.Index, pandas.DatetimeIndex, pandas.TimedeltaIndex, pandas.CategoricalIndex):
        frequency = getattr(value, "freqstr", None)
        return ["pandas index", *_column(encoder, value, depth), encoder.encode(value.name, depth), frequency]
    if kind is pandas.Series:
        index = encoder.encode(value.index, depth)
        return ["pandas series", *_column(encoder, value, depth), index, encoder.encode(value.name, depth)]
    if kind is pandas.DataFrame:
        columns = [_column(encoder, value.iloc[:, at], depth) for at in range(value.shape[1])]
        return ["pandas frame", columns, encoder.encode(value.columns, depth), encoder.encode(value.index, depth)]
    return None


def _column(encoder: Any, column: Any, depth: int) -> list[Any]:
    """Type name and encoded values of a series or an index."""
    import numpy
    import pandas

    if isinstance(column.dtype, numpy.dtype):
        return ["numpy", encoder.encode(column.to_numpy().copy(), depth)]
    if isinstance(column.dtype, pandas.CategoricalDtype):
        categorical = column.array
        fields = (categorical.categories, categorical.codes.tolist(), categorical.ordered)
        return ["category", [encoder.encode(field, depth) for field in fields]]
    return [str(column.dtype), encoder.encode(column.astype(object).tolist(), depth)]


def decode(decoder: Any, depth: int, tag: str, *fields: Any) -> Any:
    """The decoded value. Raises errors that `Decoder.decode` turns into Violation."""
    import numpy

    if tag in ("numpy array", "numpy scalar", "numpy dtype"):
        if not _matches(_DTYPE, fields[0]):
            raise ValueError(f"invalid dtype: {fields[0]}")
        dtype = numpy.dtype(fields[0])
    if tag == "numpy dtype":
        return dtype
    if tag == "numpy scalar":
        return filled(decoder, dtype, (), fields[1], depth)[()]
    if tag == "numpy array":
        _, shape, encoded = fields
        at = len(decoder.shared)
        decoder.shared.append(None)
        decoder.shared[at] = filled(decoder, dtype, tuple(map(int, shape)), encoded, depth)
        return decoder.shared[at]
    if tag == "numpy type":
        kind = getattr(numpy, str.__str__(fields[0]))
        if isinstance(kind, type) and issubclass(kind, numpy.generic):
            return kind
        raise ValueError("not a numpy scalar type")
    return _READERS[tag](decoder, depth, *fields)


def _missing(decoder: Any, depth: int, name: str) -> Any:
    import pandas

    return {"NaT": pandas.NaT, "NA": pandas.NA}[name]


def _timestamp(decoder: Any, depth: int, text: str) -> Any:
    import pandas

    return pandas.Timestamp(str.__str__(text))


def _timedelta(decoder: Any, depth: int, text: str) -> Any:
    import pandas

    return pandas.Timedelta(str.__str__(text))


def _range(decoder: Any, depth: int, *fields: Any) -> Any:
    import pandas

    start, stop, step, name = (decoder.decode(field, depth) for field in fields)
    return pandas.RangeIndex(start, stop, step, name=name)


def _multi(decoder: Any, depth: int, tuples: Any, names: Any) -> Any:
    import pandas

    return pandas.MultiIndex.from_tuples(decoder.decode(tuples, depth), names=decoder.decode(names, depth))


def _index(decoder: Any, depth: int, kind: str, encoded: Any, name: Any, frequency: str | None) -> Any:
    import pandas

    index = pandas.Index(_read_column(decoder, depth, kind, encoded), name=decoder.decode(name, depth))
    if frequency is not None:
        index.freq = str.__str__(frequency)
    return index


def _series(decoder: Any, depth: int, kind: str, encoded: Any, index: Any, name: Any) -> Any:
    import pandas

    values = _read_column(decoder, depth, kind, encoded)
    return pandas.Series(values, index=decoder.decode(index, depth), name=decoder.decode(name, depth))


def _frame(decoder: Any, depth: int, columns: Any, labels: Any, index: Any) -> Any:
    import pandas

    columns = [_read_column(decoder, depth, kind, encoded) for kind, encoded in columns]
    labels, index = decoder.decode(labels, depth), decoder.decode(index, depth)
    frame = pandas.DataFrame(dict(enumerate(columns)), index=index, columns=range(len(columns)))
    frame.columns = labels
    return frame


def _read_column(decoder: Any, depth: int, kind: str, encoded: Any) -> Any:
    import numpy
    import pandas

    if kind == "category":
        categories, codes, ordered = (decoder.decode(field, depth) for field in encoded)
        return pandas.Categorical.from_codes(codes, categories=categories, ordered=bool(ordered))
    values = decoder.decode(encoded, depth)
    if kind == "numpy":
        if type(values) is not numpy.ndarray or values.ndim != 1:
            raise ValueError("a column is not a one-dimensional array")
        return values if values.dtype.kind != "O" else pandas.array(values, dtype=object)
    if not _matches(_EXTENSION, kind):
        raise ValueError(f"invalid column dtype: {kind}")
    return pandas.array(values, dtype=kind)


_READERS: dict[str, Callable[..., Any]] = {
    "pandas missing": _missing,
    "pandas timestamp": _timestamp,
    "pandas timedelta": _timedelta,
    "pandas range": _range,
    "pandas multi": _multi,
    "pandas index": _index,
    "pandas series": _series,
    "pandas frame": _frame,
}
