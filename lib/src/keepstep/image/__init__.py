"""The image: bytes of one rank's state that are a valid safetensors file (docs/format.md).

Pure: no torch, no I/O but the reading of files in `verify`. `layout` says where every byte is,
`control` what an image is and that it is complete, `extras` holds what is no tensor, `verify`
proves that bytes are what they were.
"""

from keepstep.image.control import ControlPage
from keepstep.image.layout import (
    ELEMENT_BYTES,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    PAGE_BYTES,
    Entry,
    Layout,
    Parameters,
    Section,
    TensorSpec,
    local_name,
)
from keepstep.image.verify import (
    check_chunk,
    check_control,
    check_table,
    chunk_bounds,
    digest_table,
    read_control,
    read_layout,
    seal_for_disk,
    section_digests,
    table_of,
    tensors_in_chunk,
    verify_image,
)

__all__ = [
    "ELEMENT_BYTES",
    "FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "PAGE_BYTES",
    "ControlPage",
    "Entry",
    "Layout",
    "Parameters",
    "Section",
    "TensorSpec",
    "check_chunk",
    "check_control",
    "check_table",
    "chunk_bounds",
    "digest_table",
    "local_name",
    "read_control",
    "read_layout",
    "seal_for_disk",
    "section_digests",
    "table_of",
    "tensors_in_chunk",
    "verify_image",
]
