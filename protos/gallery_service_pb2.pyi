from google.api import annotations_pb2 as _annotations_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.rpc import status_pb2 as _status_pb2
from protos import retrieval_service_pb2 as _retrieval_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Gallery(_message.Message):
    __slots__ = ("name", "model_name", "model_fingerprint", "dimension", "items", "problem", "index_type", "recall", "fresh_items", "deleted_items", "generation", "thumbnail_side")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    INDEX_TYPE_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    FRESH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    DELETED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_SIDE_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_name: str
    model_fingerprint: str
    dimension: int
    items: int
    problem: _status_pb2.Status
    index_type: str
    recall: float
    fresh_items: int
    deleted_items: int
    generation: int
    thumbnail_side: int
    def __init__(self, name: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dimension: _Optional[int] = ..., items: _Optional[int] = ..., problem: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., index_type: _Optional[str] = ..., recall: _Optional[float] = ..., fresh_items: _Optional[int] = ..., deleted_items: _Optional[int] = ..., generation: _Optional[int] = ..., thumbnail_side: _Optional[int] = ...) -> None: ...

class CreateGalleryRequest(_message.Message):
    __slots__ = ("name", "thumbnail_side", "index", "recall", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_SIDE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    thumbnail_side: int
    index: str
    recall: float
    model: str
    def __init__(self, name: _Optional[str] = ..., thumbnail_side: _Optional[int] = ..., index: _Optional[str] = ..., recall: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class CreateGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class GetGalleryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class ListGalleriesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGalleriesResponse(_message.Message):
    __slots__ = ("galleries", "next_page_token")
    GALLERIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    galleries: _containers.RepeatedCompositeFieldContainer[Gallery]
    next_page_token: str
    def __init__(self, galleries: _Optional[_Iterable[_Union[Gallery, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteGalleryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteGalleryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BuildIndexRequest(_message.Message):
    __slots__ = ("name", "index", "recall")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    name: str
    index: str
    recall: float
    def __init__(self, name: _Optional[str] = ..., index: _Optional[str] = ..., recall: _Optional[float] = ...) -> None: ...

class BuildIndexResponse(_message.Message):
    __slots__ = ("stage", "done", "total", "gallery")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done: int
    total: int
    gallery: Gallery
    def __init__(self, stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class SwitchGalleryRequest(_message.Message):
    __slots__ = ("name", "other")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    name: str
    other: str
    def __init__(self, name: _Optional[str] = ..., other: _Optional[str] = ...) -> None: ...

class SwitchGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class RollbackGalleryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RollbackGalleryResponse(_message.Message):
    __slots__ = ("gallery", "other")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    other: str
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ..., other: _Optional[str] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("key", "image", "vector", "label", "uri", "metadata", "expected_version")
    KEY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    key: str
    image: bytes
    vector: bytes
    label: str
    uri: str
    metadata: _struct_pb2.Struct
    expected_version: int
    def __init__(self, key: _Optional[str] = ..., image: _Optional[bytes] = ..., vector: _Optional[bytes] = ..., label: _Optional[str] = ..., uri: _Optional[str] = ..., metadata: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., expected_version: _Optional[int] = ...) -> None: ...

class StoredItem(_message.Message):
    __slots__ = ("key", "version", "label", "uri", "metadata", "vector", "thumbnail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    label: str
    uri: str
    metadata: _struct_pb2.Struct
    vector: bytes
    thumbnail: bytes
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., label: _Optional[str] = ..., uri: _Optional[str] = ..., metadata: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., vector: _Optional[bytes] = ..., thumbnail: _Optional[bytes] = ...) -> None: ...

class UpsertItemsRequest(_message.Message):
    __slots__ = ("gallery", "items")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, gallery: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class UpsertItemsResponse(_message.Message):
    __slots__ = ("stored", "timings", "versions")
    STORED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    stored: int
    timings: _retrieval_service_pb2.Timings
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stored: _Optional[int] = ..., timings: _Optional[_Union[_retrieval_service_pb2.Timings, _Mapping]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class DeleteItemsRequest(_message.Message):
    __slots__ = ("gallery", "keys", "expected_versions")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    expected_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, gallery: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., expected_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class DeleteItemsResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class GetItemRequest(_message.Message):
    __slots__ = ("gallery", "key", "with_thumbnail")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WITH_THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    key: str
    with_thumbnail: bool
    def __init__(self, gallery: _Optional[str] = ..., key: _Optional[str] = ..., with_thumbnail: _Optional[bool] = ...) -> None: ...

class GetItemResponse(_message.Message):
    __slots__ = ("item", "thumbnail")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_FIELD_NUMBER: _ClassVar[int]
    item: StoredItem
    thumbnail: bytes
    def __init__(self, item: _Optional[_Union[StoredItem, _Mapping]] = ..., thumbnail: _Optional[bytes] = ...) -> None: ...

class ListItemsRequest(_message.Message):
    __slots__ = ("gallery", "page_size", "page_token", "key_prefix", "with_vectors", "with_thumbnails", "filter")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    WITH_VECTORS_FIELD_NUMBER: _ClassVar[int]
    WITH_THUMBNAILS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    page_size: int
    page_token: str
    key_prefix: str
    with_vectors: bool
    with_thumbnails: bool
    filter: _retrieval_service_pb2.Filter
    def __init__(self, gallery: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., key_prefix: _Optional[str] = ..., with_vectors: _Optional[bool] = ..., with_thumbnails: _Optional[bool] = ..., filter: _Optional[_Union[_retrieval_service_pb2.Filter, _Mapping]] = ...) -> None: ...

class ListItemsResponse(_message.Message):
    __slots__ = ("items", "next_page_token")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[StoredItem]
    next_page_token: str
    def __init__(self, items: _Optional[_Iterable[_Union[StoredItem, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ItemUpdate(_message.Message):
    __slots__ = ("key", "metadata", "replace_metadata", "label", "uri", "expected_version")
    KEY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REPLACE_METADATA_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    key: str
    metadata: _struct_pb2.Struct
    replace_metadata: bool
    label: str
    uri: str
    expected_version: int
    def __init__(self, key: _Optional[str] = ..., metadata: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., replace_metadata: _Optional[bool] = ..., label: _Optional[str] = ..., uri: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class UpdateItemsRequest(_message.Message):
    __slots__ = ("gallery", "items")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    items: _containers.RepeatedCompositeFieldContainer[ItemUpdate]
    def __init__(self, gallery: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ItemUpdate, _Mapping]]] = ...) -> None: ...

class UpdateItemsResponse(_message.Message):
    __slots__ = ("updated", "versions")
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    updated: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, updated: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class CountItemsRequest(_message.Message):
    __slots__ = ("gallery", "filter")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    filter: _retrieval_service_pb2.Filter
    def __init__(self, gallery: _Optional[str] = ..., filter: _Optional[_Union[_retrieval_service_pb2.Filter, _Mapping]] = ...) -> None: ...

class CountItemsResponse(_message.Message):
    __slots__ = ("items", "unknown_fields")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELDS_FIELD_NUMBER: _ClassVar[int]
    items: int
    unknown_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[int] = ..., unknown_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class SampleItemsRequest(_message.Message):
    __slots__ = ("gallery", "size", "filter", "with_thumbnails", "seed")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    WITH_THUMBNAILS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    size: int
    filter: _retrieval_service_pb2.Filter
    with_thumbnails: bool
    seed: int
    def __init__(self, gallery: _Optional[str] = ..., size: _Optional[int] = ..., filter: _Optional[_Union[_retrieval_service_pb2.Filter, _Mapping]] = ..., with_thumbnails: _Optional[bool] = ..., seed: _Optional[int] = ...) -> None: ...

class SampleItemsResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[StoredItem]
    def __init__(self, items: _Optional[_Iterable[_Union[StoredItem, _Mapping]]] = ...) -> None: ...

class ListFieldsRequest(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    def __init__(self, gallery: _Optional[str] = ...) -> None: ...

class ListFieldsResponse(_message.Message):
    __slots__ = ("fields",)
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    def __init__(self, fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("name", "kinds", "items", "least", "most")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    items: int
    least: float
    most: float
    def __init__(self, name: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., items: _Optional[int] = ..., least: _Optional[float] = ..., most: _Optional[float] = ...) -> None: ...

class ListValuesRequest(_message.Message):
    __slots__ = ("gallery", "field", "prefix", "page_size")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    field: str
    prefix: str
    page_size: int
    def __init__(self, gallery: _Optional[str] = ..., field: _Optional[str] = ..., prefix: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListValuesResponse(_message.Message):
    __slots__ = ("values", "distinct")
    class Count(_message.Message):
        __slots__ = ("value", "items")
        VALUE_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        value: _retrieval_service_pb2.Filter.Value
        items: int
        def __init__(self, value: _Optional[_Union[_retrieval_service_pb2.Filter.Value, _Mapping]] = ..., items: _Optional[int] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[ListValuesResponse.Count]
    distinct: int
    def __init__(self, values: _Optional[_Iterable[_Union[ListValuesResponse.Count, _Mapping]]] = ..., distinct: _Optional[int] = ...) -> None: ...

class ListDuplicatesRequest(_message.Message):
    __slots__ = ("gallery", "above", "page_size", "page_token")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    above: float
    page_size: int
    page_token: str
    def __init__(self, gallery: _Optional[str] = ..., above: _Optional[float] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDuplicatesResponse(_message.Message):
    __slots__ = ("pairs", "compared", "items", "next_page_token")
    class Pair(_message.Message):
        __slots__ = ("key", "other", "score")
        KEY_FIELD_NUMBER: _ClassVar[int]
        OTHER_FIELD_NUMBER: _ClassVar[int]
        SCORE_FIELD_NUMBER: _ClassVar[int]
        key: str
        other: str
        score: float
        def __init__(self, key: _Optional[str] = ..., other: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[ListDuplicatesResponse.Pair]
    compared: int
    items: int
    next_page_token: str
    def __init__(self, pairs: _Optional[_Iterable[_Union[ListDuplicatesResponse.Pair, _Mapping]]] = ..., compared: _Optional[int] = ..., items: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetMapTileRequest(_message.Message):
    __slots__ = ("gallery", "zoom", "column", "row", "field")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ZOOM_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    zoom: int
    column: int
    row: int
    field: str
    def __init__(self, gallery: _Optional[str] = ..., zoom: _Optional[int] = ..., column: _Optional[int] = ..., row: _Optional[int] = ..., field: _Optional[str] = ...) -> None: ...

class GetMapTileResponse(_message.Message):
    __slots__ = ("points", "keys", "values", "value_of", "items")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VALUE_OF_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    points: bytes
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    value_of: bytes
    items: int
    def __init__(self, points: _Optional[bytes] = ..., keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ..., value_of: _Optional[bytes] = ..., items: _Optional[int] = ...) -> None: ...
