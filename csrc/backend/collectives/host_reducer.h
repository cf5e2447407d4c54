// Sums landed slices of CPU tensors with ATen.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "backend/collectives/reduction.h"
#include "transport/call.h"

namespace pg_sdma {

class HostReducer final : public Reducer {
 public:
  // Whether tensors of this type are summed here: fp16, bf16, fp32 and fp64.
  static bool takes(at::ScalarType type);

  // `types`: of each tensor of the call. `slice_bytes`: of one rank's slices of all tensors, for
  // which there is no need of more room. Takes at most `most_bytes` from torch's CPU allocator, at
  // once; only where that is not enough for kMostElement bytes of each rank does it take more.
  HostReducer(Reduction reduction, int rank, int world, std::vector<at::ScalarType> types,
              size_t slice_bytes, size_t most_bytes);

  int landings() const override { return 1; }
  size_t room() const override { return room_; }
  void* landing(int which, int peer) override;
  Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) override;
  // Sums bytes [offset, offset + bytes) of every rank's slice of `share`, which are in `slices` in
  // the order of ranks.
  void reduce(const Share& share, size_t offset, size_t bytes,
              const std::vector<const void*>& slices);

 private:
  const Reduction reduction_;
  const int rank_;
  const int world_;
  const std::vector<at::ScalarType> types_;
  size_t room_ = 0;
  at::Tensor memory_;
  std::byte* sum_ = nullptr;      // in the precision of the sum
  std::byte* widened_ = nullptr;  // one rank's slice in the precision of the sum, of the half types
};

}  // namespace pg_sdma
