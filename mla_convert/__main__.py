"""``python -m mla_convert``: the same as the ``mla-convert`` command."""

from mla_convert.cli import main

if __name__ == "__main__":
    main()
