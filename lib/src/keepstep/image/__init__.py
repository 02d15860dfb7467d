"""The image: the bytes of one rank's state, as a valid safetensors file (docs/format.md).

Pure: no torch, and no I/O except that `verify` reads files. `layout` says where every byte is.
`control` says what an image is and that it is complete. `extras` encodes values that are not
tensors. `verify` proves that bytes did not change.
"""

from keepstep.image.control import ControlPage as ControlPage
from keepstep.image.headers import FORMAT_VERSION as FORMAT_VERSION
from keepstep.image.headers import HUGE_PAGE_BYTES as HUGE_PAGE_BYTES
from keepstep.image.headers import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from keepstep.image.headers import PAGE_BYTES as PAGE_BYTES
from keepstep.image.headers import Entry as Entry
from keepstep.image.layout import Layout as Layout
from keepstep.image.tensors import ELEMENT_BYTES as ELEMENT_BYTES
from keepstep.image.tensors import Parameters as Parameters
from keepstep.image.tensors import Section as Section
from keepstep.image.tensors import TensorSpec as TensorSpec
from keepstep.image.tensors import base_of as base_of
from keepstep.image.tensors import local_name as local_name
from keepstep.image.tensors import strides_with_gaps as strides_with_gaps
from keepstep.image.verify import check_chunk as check_chunk
from keepstep.image.verify import check_control as check_control
from keepstep.image.verify import check_table as check_table
from keepstep.image.verify import chunk_bounds as chunk_bounds
from keepstep.image.verify import read_control as read_control
from keepstep.image.verify import read_layout as read_layout
from keepstep.image.verify import seal_for_disk as seal_for_disk
from keepstep.image.verify import section_digests as section_digests
from keepstep.image.verify import table_of as table_of
from keepstep.image.verify import tensors_in_chunk as tensors_in_chunk
