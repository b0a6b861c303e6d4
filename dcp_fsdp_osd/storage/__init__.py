"""DCP storage: StreamingWriter and StreamingReader, for local paths and any URL."""

from dcp_fsdp_osd.storage.latest import latest
from dcp_fsdp_osd.storage.reader import StreamingReader
from dcp_fsdp_osd.storage.writer import StreamingWriter

__all__ = ["StreamingReader", "StreamingWriter", "latest"]
