"""Linear algebra, transforms, contractions."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.functions.registry import EXACT, case, normal


@case(normal(0, 8, 8), normal(1, 8, 4))
def cholesky_solve(a, b):
    definite = a @ a.T + 8.0 * jnp.eye(8)
    factor = jax.scipy.linalg.cho_factor(definite)
    return jax.scipy.linalg.cho_solve(factor, b), jnp.linalg.cholesky(definite)


@case(normal(0, 4, 8, 8), normal(1, 4, 8, 2))
def linear_algebra(a, b):
    sign, logarithm = jnp.linalg.slogdet(a)
    a = a + 4.0 * jnp.eye(8)[None]
    return jnp.linalg.solve(a, b), jnp.linalg.det(a), sign, logarithm, jnp.linalg.inv(a)


@case(normal(0, 8, 6))
def factorisations(a):
    q, r = jnp.linalg.qr(a)
    values = jnp.linalg.svd(a, compute_uv=False)
    symmetric = jnp.linalg.eigvalsh(a.T @ a)
    return jnp.abs(q), jnp.abs(r), values, symmetric, jnp.linalg.norm(a, axis=1), jnp.trace(a)


@case(normal(0, 4, 32), normal(1, 1, 32))
def fourier_convolution(x, kernel):
    product = jnp.fft.rfft(x) * jnp.fft.rfft(kernel)
    return jnp.fft.irfft(product, n=32), jnp.abs(jnp.fft.fft2(x))


@case(normal(0, 4, 8), normal(1, 8, 4))
def complex_numbers(a, b):
    z = lax.complex(a, b.T) * (1.0 + 2.0j)
    return z @ jnp.conj(z).T, jnp.real(z), jnp.angle(z), jnp.exp(z)


@case(normal(0, 4, 6, 8), normal(1, 4, 8, 2), normal(2, 6), normal(3, 8))
def einsum_zoo(a, b, c, d):
    return (
        jnp.einsum("bij,bjk->bik", a, b),
        jnp.einsum("bij,bjk->ki", a, b),
        jnp.einsum("bij,i,j->b", a, c, d),
        jnp.einsum("i,j->ji", c, d),
        jnp.einsum("bij->jb", a),
        jnp.einsum("ii->i", b[:, :4, 0]),
        jnp.tensordot(a, b, axes=((0, 2), (0, 1))),
        jnp.einsum("...j,j->...", a, d),
    )


@case(normal(0, 8, 8), normal(1, 8, 16))
def mixed_partitions(x, w):
    y = x @ w
    narrow = y @ w.T[:, :2]
    return y.T @ y, narrow + narrow.T[:1, :2] * x[:, :2], jnp.max(y, axis=0)[:, None] * y.T


@case(normal(0, 8, 16), tolerance=EXACT)
def special_functions(x):
    y = jnp.abs(x) + 0.5
    angles = jnp.arctan2(x, y) + jnp.arcsinh(x) * lax.erf(x) - jnp.cbrt(x)
    return angles, lax.lgamma(y), lax.digamma(y), lax.bessel_i1e(x), jnp.sinc(x)


@case(normal(0, 4, 2, 16), normal(1, 3, 2, 5))
def correlations(x, kernel):
    same = lax.conv(x, kernel, (1,), "SAME")
    full = jax.vmap(lambda row: jnp.convolve(row, kernel[0, 0]))(x[:, 0])
    layout = ("NCH", "HIO", "NCH")
    spread = lax.conv_transpose(x, kernel.T, (2,), "SAME", dimension_numbers=layout)
    return same, full, spread


@case(normal(0, 16, 4))
def statistics(x):
    centred = x - jnp.mean(x, axis=0, keepdims=True)
    covariance = centred.T @ centred / 15.0
    quantiles = jnp.quantile(x, jnp.array([0.25, 0.75]), axis=0)
    return covariance, jnp.std(x, axis=1), quantiles, jnp.histogram(x, bins=5)[0], jnp.ptp(x)
