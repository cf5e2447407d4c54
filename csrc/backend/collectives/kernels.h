// The kernels that sum on a GPU: compiled at first use by who can (Python, with Triton), then kept.
#pragma once

#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>

#include "backend/collectives/reduction.h"

namespace pg_sdma::kernels {

// What a kernel is compiled for.
struct Key {
  int device = 0;
  c10::ScalarType type{};
  int world = 1;
  int rank = 0;
  Reduction::Kind kind{};
  bool aligned = false;  // output and own slice at multiples of 16 bytes

  auto operator<=>(const Key&) const = default;
};

// Takes output, own slice, landing, the landing's stride in elements (a multiple of kStride), the
// number of elements, and the bits of the factor, each in 8 bytes.
struct Kernel {
  void* function = nullptr;  // the driver's handle, on the key's device
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  unsigned blocks = 0;  // at most, of a launch
};
constexpr size_t kStride = 16;

// Nothing: not at this moment. Throws std::runtime_error with the reason where it cannot.
using Compiler = std::function<std::optional<Kernel>(const Key&)>;
void set_compiler(Compiler compiler);

// The kernel for `key`, which the first call compiles: it may take seconds, and Python's lock.
// Throws std::runtime_error with the reason, at every call the same.
Kernel find(const Key& key);

}  // namespace pg_sdma::kernels
