"""``python -m tvm_attn``: the command ``tvm-attn``, where scripts are not on the path."""

from tvm_attn.cli import main

if __name__ == "__main__":
    main()
