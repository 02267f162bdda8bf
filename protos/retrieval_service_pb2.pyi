from google.api import annotations_pb2 as _annotations_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedRequest(_message.Message):
    __slots__ = ("images", "model")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedScalarFieldContainer[bytes]
    model: str
    def __init__(self, images: _Optional[_Iterable[bytes]] = ..., model: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("results", "model_name", "model_fingerprint", "dimension", "timings")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EmbedResult]
    model_name: str
    model_fingerprint: str
    dimension: int
    timings: Timings
    def __init__(self, results: _Optional[_Iterable[_Union[EmbedResult, _Mapping]]] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dimension: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class EmbedResult(_message.Message):
    __slots__ = ("vector", "error")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    vector: bytes
    error: _status_pb2.Status
    def __init__(self, vector: _Optional[bytes] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("gallery", "queries", "k", "minimum_score", "exclude_keys", "filter", "group_by_label", "model", "exclude_same", "exclude_same_above", "with_thumbnails", "with_vectors")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_SCORE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_KEYS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_SAME_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_SAME_ABOVE_FIELD_NUMBER: _ClassVar[int]
    WITH_THUMBNAILS_FIELD_NUMBER: _ClassVar[int]
    WITH_VECTORS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    k: int
    minimum_score: float
    exclude_keys: _containers.RepeatedScalarFieldContainer[str]
    filter: Filter
    group_by_label: bool
    model: str
    exclude_same: str
    exclude_same_above: float
    with_thumbnails: bool
    with_vectors: bool
    def __init__(self, gallery: _Optional[str] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., k: _Optional[int] = ..., minimum_score: _Optional[float] = ..., exclude_keys: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ..., group_by_label: _Optional[bool] = ..., model: _Optional[str] = ..., exclude_same: _Optional[str] = ..., exclude_same_above: _Optional[float] = ..., with_thumbnails: _Optional[bool] = ..., with_vectors: _Optional[bool] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("image", "vector", "key")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    vector: bytes
    key: str
    def __init__(self, image: _Optional[bytes] = ..., vector: _Optional[bytes] = ..., key: _Optional[str] = ...) -> None: ...

class Filter(_message.Message):
    __slots__ = ("equal", "among", "range", "exists", "all_of", "any_of", "negated")
    class Value(_message.Message):
        __slots__ = ("string", "number", "boolean")
        STRING_FIELD_NUMBER: _ClassVar[int]
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        BOOLEAN_FIELD_NUMBER: _ClassVar[int]
        string: str
        number: float
        boolean: bool
        def __init__(self, string: _Optional[str] = ..., number: _Optional[float] = ..., boolean: _Optional[bool] = ...) -> None: ...
    class Equal(_message.Message):
        __slots__ = ("field", "value")
        FIELD_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        field: str
        value: Filter.Value
        def __init__(self, field: _Optional[str] = ..., value: _Optional[_Union[Filter.Value, _Mapping]] = ...) -> None: ...
    class Among(_message.Message):
        __slots__ = ("field", "values")
        FIELD_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        field: str
        values: _containers.RepeatedCompositeFieldContainer[Filter.Value]
        def __init__(self, field: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Filter.Value, _Mapping]]] = ...) -> None: ...
    class Range(_message.Message):
        __slots__ = ("field", "above", "least", "below", "most")
        FIELD_FIELD_NUMBER: _ClassVar[int]
        ABOVE_FIELD_NUMBER: _ClassVar[int]
        LEAST_FIELD_NUMBER: _ClassVar[int]
        BELOW_FIELD_NUMBER: _ClassVar[int]
        MOST_FIELD_NUMBER: _ClassVar[int]
        field: str
        above: Filter.Value
        least: Filter.Value
        below: Filter.Value
        most: Filter.Value
        def __init__(self, field: _Optional[str] = ..., above: _Optional[_Union[Filter.Value, _Mapping]] = ..., least: _Optional[_Union[Filter.Value, _Mapping]] = ..., below: _Optional[_Union[Filter.Value, _Mapping]] = ..., most: _Optional[_Union[Filter.Value, _Mapping]] = ...) -> None: ...
    class Several(_message.Message):
        __slots__ = ("filters",)
        FILTERS_FIELD_NUMBER: _ClassVar[int]
        filters: _containers.RepeatedCompositeFieldContainer[Filter]
        def __init__(self, filters: _Optional[_Iterable[_Union[Filter, _Mapping]]] = ...) -> None: ...
    EQUAL_FIELD_NUMBER: _ClassVar[int]
    AMONG_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    ALL_OF_FIELD_NUMBER: _ClassVar[int]
    ANY_OF_FIELD_NUMBER: _ClassVar[int]
    NEGATED_FIELD_NUMBER: _ClassVar[int]
    equal: Filter.Equal
    among: Filter.Among
    range: Filter.Range
    exists: str
    all_of: Filter.Several
    any_of: Filter.Several
    negated: Filter
    def __init__(self, equal: _Optional[_Union[Filter.Equal, _Mapping]] = ..., among: _Optional[_Union[Filter.Among, _Mapping]] = ..., range: _Optional[_Union[Filter.Range, _Mapping]] = ..., exists: _Optional[str] = ..., all_of: _Optional[_Union[Filter.Several, _Mapping]] = ..., any_of: _Optional[_Union[Filter.Several, _Mapping]] = ..., negated: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("results", "model_fingerprint", "timings", "unknown_fields")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELDS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SearchResult]
    model_fingerprint: str
    timings: Timings
    unknown_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, results: _Optional[_Iterable[_Union[SearchResult, _Mapping]]] = ..., model_fingerprint: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., unknown_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class SearchResult(_message.Message):
    __slots__ = ("hits", "error")
    HITS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedCompositeFieldContainer[Hit]
    error: _status_pb2.Status
    def __init__(self, hits: _Optional[_Iterable[_Union[Hit, _Mapping]]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Hit(_message.Message):
    __slots__ = ("key", "score", "label", "uri", "metadata", "version", "vector", "thumbnail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    key: str
    score: float
    label: str
    uri: str
    metadata: _struct_pb2.Struct
    version: int
    vector: bytes
    thumbnail: bytes
    def __init__(self, key: _Optional[str] = ..., score: _Optional[float] = ..., label: _Optional[str] = ..., uri: _Optional[str] = ..., metadata: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., version: _Optional[int] = ..., vector: _Optional[bytes] = ..., thumbnail: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("images", "model")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedScalarFieldContainer[bytes]
    model: str
    def __init__(self, images: _Optional[_Iterable[bytes]] = ..., model: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("results", "model_name", "model_fingerprint", "prototypes", "timings")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOTYPES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ExplainResult]
    model_name: str
    model_fingerprint: str
    prototypes: int
    timings: Timings
    def __init__(self, results: _Optional[_Iterable[_Union[ExplainResult, _Mapping]]] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., prototypes: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class ExplainResult(_message.Message):
    __slots__ = ("histogram", "assignments", "height", "width", "error")
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    histogram: bytes
    assignments: bytes
    height: int
    width: int
    error: _status_pb2.Status
    def __init__(self, histogram: _Optional[bytes] = ..., assignments: _Optional[bytes] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("decode_us", "queue_us", "encode_us", "gallery_us", "total_us")
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENCODE_US_FIELD_NUMBER: _ClassVar[int]
    GALLERY_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    decode_us: int
    queue_us: int
    encode_us: int
    gallery_us: int
    total_us: int
    def __init__(self, decode_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., encode_us: _Optional[int] = ..., gallery_us: _Optional[int] = ..., total_us: _Optional[int] = ...) -> None: ...
