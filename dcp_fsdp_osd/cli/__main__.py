"""``python -m dcp_fsdp_osd.cli``, which is ``dcp-osd``."""

from dcp_fsdp_osd.cli import main

if __name__ == "__main__":
    main()
