"""What peers and archives are tested with, for what they have in common."""

from tests.archive.conftest import archive_dir, bucket, gateway, local, volumes  # noqa: F401
from tests.peer.conftest import authority, node  # noqa: F401
