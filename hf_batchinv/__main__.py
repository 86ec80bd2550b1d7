"""`python -m hf_batchinv` is the command `hf-batchinv`."""

from .cli import main

if __name__ == "__main__":
    main()
