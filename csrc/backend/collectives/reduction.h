// What a reduce-scatter makes of the ranks' numbers.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>

namespace pg_sdma {

// The sum over all ranks in fp32 (fp64 for fp64), in rank order; then, still in that precision,
// times the factor or divided by the number of ranks; then rounded once to the tensors' dtype.
struct Reduction {
  enum class Kind : uint8_t { kSum, kAverage, kPremultiplied };
  Kind kind = Kind::kSum;
  double factor = 1;  // kPremultiplied

  // The same text for the same reduction, and for no other.
  std::string words() const;
};

// Why reduce-scatters with `op` of tensors on `device` have no direct form; empty when they have
// one.
std::string refusal(const c10d::ReduceOp& op, c10::Device device);

// Of `op`, which is not refused. Reads nothing of a factor.
Reduction::Kind kind_of(const c10d::ReduceOp& op);

// `op`, which is not refused. Reads the factor of a PREMUL_SUM, which may be a tensor that
// collectives before this one have yet to write.
Reduction read_reduction(const c10d::ReduceOp& op);

}  // namespace pg_sdma
