"""RoPE as a plain C++ extension, built like TransformerEngine's: C++ allocates the output and launches a kernel.

It shows the host's time of such a call, and takes only what that needs: a query, and in place also a key, contiguous
bfloat16 ``[batch, seq, heads, D]``, float32 cosines and sines ``[seq, D / 2]``, pairs (j, j + D / 2).
``python -m benchmarks.extension`` builds it with nvcc; so does its first use.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import torch

from benchmarks.call import Call

CPP = """
#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

void rotate(const void* x, void* out, const float* cos, const float* sin, int64_t tokens, int64_t seq, int64_t heads,
            int64_t head_dim, void* stream);

static void launch(const at::Tensor& x, const at::Tensor& out, const at::Tensor& cos, const at::Tensor& sin) {
  TORCH_CHECK(x.dim() == 4 && x.is_cuda() && x.is_contiguous() && x.scalar_type() == at::kBFloat16,
              "x must be contiguous bfloat16 [batch, seq, heads, D] on a GPU");
  TORCH_CHECK(cos.dim() == 2 && cos.scalar_type() == at::kFloat && cos.is_contiguous() && cos.sizes() == sin.sizes() &&
              sin.scalar_type() == at::kFloat && sin.is_contiguous() && 2 * cos.size(1) == x.size(3) &&
              cos.size(0) >= x.size(1), "cos and sin must be contiguous float32 [seq, D / 2]");
  rotate(x.const_data_ptr(), out.mutable_data_ptr(), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
         x.size(0) * x.size(1), x.size(1), x.size(2), x.size(3), c10::cuda::getCurrentCUDAStream().stream());
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  at::Tensor out = at::empty_like(x);
  launch(x, out, cos, sin);
  return out;
}

void rope_inplace(const std::vector<at::Tensor>& rotated, const at::Tensor& cos, const at::Tensor& sin) {
  for (const at::Tensor& x : rotated) launch(x, x, cos, sin);
}
"""

CUDA = """
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

// A block a head, a thread a pair: it alone reads and writes the two features.
__global__ void rotate_pairs(const __nv_bfloat16* x, __nv_bfloat16* out, const float* cos, const float* sin,
                             int64_t seq, int64_t heads) {
  int64_t half = blockDim.x, first = blockIdx.x * 2 * half + threadIdx.x;
  int64_t angle = blockIdx.x / heads % seq * half + threadIdx.x;
  float c = cos[angle], s = sin[angle], a = __bfloat162float(x[first]), b = __bfloat162float(x[first + half]);
  out[first] = __float2bfloat16(a * c - b * s);
  out[first + half] = __float2bfloat16(b * c + a * s);
}

void rotate(const void* x, void* out, const float* cos, const float* sin, int64_t tokens, int64_t seq, int64_t heads,
            int64_t head_dim, void* stream) {
  rotate_pairs<<<tokens * heads, head_dim / 2, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const __nv_bfloat16*>(x), static_cast<__nv_bfloat16*>(out), cos, sin, seq, heads);
}
"""


def refuses(call: Call) -> str | None:
    """Why the extension does not take a call, or None."""
    plain = (call.layout, call.direction, call.dtype, call.positions, call.rotated, call.packed, call.interleaved)
    asked = ("bshd", "forward", torch.bfloat16, "implicit", "first", False, False)
    fits = plain == asked and call.rotary_dim == call.head_dim and (call.inplace or not call.key_heads)
    return None if fits else "it takes bfloat16 bshd with cosines and sines, and a key in place only"


@functools.cache
def load() -> Any:
    """Build the extension, or take it from PyTorch's cache of extensions.

    Raises:
        ImportError: there is no CUDA compiler, or it failed.
    """
    from torch.utils import cpp_extension  # noqa: PLC0415 (slow to import, and only this needs it)

    try:
        return cpp_extension.load_inline(
            "rope_extension",
            cpp_sources=[CPP],
            cuda_sources=[CUDA],
            functions=["rope", "rope_inplace"],
            extra_cflags=["-O2"],
            extra_cuda_cflags=["-O3"],
            with_cuda=True,
            no_implicit_headers=True,
        )
    except (OSError, RuntimeError) as error:
        raise ImportError(f"the C++ extension was not built: {error}") from error


def main() -> int:
    """Build the extension, and say where there is no compiler."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(
        prog="python -m benchmarks.extension", description=__doc__, formatter_class=form
    ).parse_args()
    try:
        load()
    except ImportError as error:
        print(f"{str(error).rstrip('.')}: install the CUDA toolkit, or do without this peer", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
