"""The image: the bytes of one rank's state, as a valid safetensors file (docs/format.md).

Pure: no torch, and no I/O except that `control_page` reads files. `layout` says where every byte
is. `control` says what an image is and that it is complete. `extras_codec` encodes values that
are not tensors. `control_page` proves that bytes did not change.
"""

from keepstep.image.control_page import BaseRef as BaseRef
from keepstep.image.control_page import ControlPage as ControlPage
from keepstep.image.control_page import check_control as check_control
from keepstep.image.control_page import chunk_bounds as chunk_bounds
from keepstep.image.control_page import digest_table as digest_table
from keepstep.image.control_page import read_control as read_control
from keepstep.image.control_page import read_layout as read_layout
from keepstep.image.control_page import seal_for_disk as seal_for_disk
from keepstep.image.control_page import section_digests as section_digests
from keepstep.image.control_page import tensors_in_chunk as tensors_in_chunk
from keepstep.image.layout import FORMAT_VERSION as FORMAT_VERSION
from keepstep.image.layout import HUGE_PAGE_BYTES as HUGE_PAGE_BYTES
from keepstep.image.layout import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from keepstep.image.layout import PAGE_BYTES as PAGE_BYTES
from keepstep.image.layout import Entry as Entry
from keepstep.image.layout import Layout as Layout
from keepstep.image.tensor_specs import ELEMENT_BYTES as ELEMENT_BYTES
from keepstep.image.tensor_specs import FlatBox as FlatBox
from keepstep.image.tensor_specs import Parameters as Parameters
from keepstep.image.tensor_specs import TensorRole as TensorRole
from keepstep.image.tensor_specs import TensorSpec as TensorSpec
from keepstep.image.tensor_specs import add_rank_suffix as add_rank_suffix
from keepstep.image.tensor_specs import dim_order as dim_order
from keepstep.image.tensor_specs import split_local_name as split_local_name
from keepstep.image.tensor_specs import strides_with_gaps as strides_with_gaps
