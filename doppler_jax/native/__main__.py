"""`python -m doppler_jax.native` compiles all native code, if it is not compiled yet."""

from doppler_jax.native import compile_all

if __name__ == "__main__":
    compile_all()
